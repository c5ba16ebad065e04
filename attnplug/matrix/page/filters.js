// The filters: a button for each status, a list for each field, a text.

const debounced = { timer: 0 };

/** Build the controls once; they call `changed` when the state has changed. */
function buildFilters(changed) {
  statuses.forEach((status, number) => {
    const toggle = () => {
      if (!state.status.delete(number)) state.status.add(number);
      changed();
    };
    const button = make(
      "button",
      { type: "button", className: `toggle is-${statusClass(number)}`, title: status.meaning, onclick: toggle },
      mark(number),
      make("span", { className: "word" }, status.word),
      make("span", { className: "count" }),
    );
    button.hidden = !status.ofCells;
    byId("statuses").append(button);
  });
  byId("fields").append(...FIELDS.map((field) => selectFor(field, changed)), searchBox(changed));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("more").open = matchMedia("(min-width: 48rem)").matches;
}

function selectFor(field, changed) {
  const choose = (event) => {
    if (event.target.value) state.chosen.set(field.key, event.target.value);
    else state.chosen.delete(field.key);
    changed();
  };
  const options = field.values.map((value) => make("option", { value }, wordsOf(field, value)));
  const select = make("select", { id: `field-${field.key}`, onchange: choose }, make("option", { value: "" }, "any"), ...options);
  return make("label", {}, make("span", {}, field.name), select);
}

function searchBox(changed) {
  const type = (event) => {
    clearTimeout(debounced.timer);
    debounced.timer = setTimeout(() => {
      state.text = event.target.value.trim();
      changed();
    }, 120);
  };
  const box = make("input", { id: "field-text", type: "search", placeholder: "a reason, a size, a name", oninput: type });
  return make("label", { className: "wide" }, make("span", {}, "text"), box);
}

/** Show the state in the controls, and beside each status how many cells the other filters leave it. */
function drawFilters() {
  for (const field of FIELDS) byId(`field-${field.key}`).value = state.chosen.get(field.key) ?? "";
  const box = byId("field-text");
  if (box.value.trim() !== state.text) box.value = state.text;
  const counts = new Array(statuses.length).fill(0);
  for (const row of passing("status")) counts[rows.status[row]] += 1;
  [...byId("statuses").children].forEach((button, number) => {
    button.setAttribute("aria-pressed", state.status.has(number));
    button.querySelector(".count").textContent = count(counts[number]);
    button.classList.toggle("empty", counts[number] === 0);
  });
  const used = state.chosen.size + (state.text ? 1 : 0);
  byId("more-label").textContent = used ? `Filters (${used} in use)` : "Filters";
}

/** The filters in use, each with a button that ends it. */
function drawChips(changed) {
  const chips = [];
  const chip = (name, words, end) => {
    const ended = () => {
      end();
      changed();
      byId("cells-title").focus({ preventScroll: true });
    };
    const cross = make("span", { "aria-hidden": "true" }, "×");
    const label = `Remove the filter ${name} ${words}`;
    chips.push(make("li", {}, make("button", { type: "button", "aria-label": label, onclick: ended }, `${name}: ${words} `, cross)));
  };
  for (const field of FIELDS.filter((each) => state.chosen.has(each.key))) {
    chip(field.name, wordsOf(field, state.chosen.get(field.key)), () => state.chosen.delete(field.key));
  }
  for (const status of state.status) chip("status", statuses[status].word, () => state.status.delete(status));
  if (state.text) chip("text", state.text, () => (state.text = ""));
  if (chips.length > 1) {
    const all = () => {
      Object.assign(state, emptyState(), { by: state.by });
      changed();
      byId("cells-title").focus({ preventScroll: true });
    };
    chips.push(make("li", {}, make("button", { type: "button", className: "all", onclick: all }, "Clear all")));
  }
  byId("chips").replaceChildren(...chips);
}
