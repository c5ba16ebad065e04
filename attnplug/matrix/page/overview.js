// The overview: the values of one axis by the backends of each device, each answer a button to its reasons.

/** Build the choice of the axis and the legend once. */
function buildOverview(changed) {
  const used = new Set(rows.status);
  if (used.has(VERIFIED)) used.add(SAMPLED);
  const meanings = [...statuses.keys()].filter((status) => used.has(status)).map((status) =>
    make("li", {}, badge(status), `: ${statuses[status].meaning}`),
  );
  byId("legend").append(...meanings);
  makeOneStop(byId("overview"), overviewButtons);
  makeOneStop(byId("nothing"), () => [...byId("nothing").children].map((line) => [...line.querySelectorAll("button")]));
  axes.forEach((axis, number) => {
    const choose = () => {
      state.by = number;
      changed();
    };
    const radio = make("input", { type: "radio", name: "by", value: axis.field, onchange: choose });
    byId("by").append(make("label", {}, radio, make("span", {}, axis.name)));
  });
}

/** The answers of the table as rows; null for a place without one. */
function overviewButtons() {
  return [...byId("overview").tBodies].flatMap((body) => [...body.rows]).map((row) =>
    [...row.cells].slice(1).map((cell) => cell.querySelector("button")),
  );
}

/** Draw the table for the rows that the filters leave; `open` shows what is behind an answer. */
function drawOverview(open) {
  byId("by").elements[state.by].checked = true;
  const found = passing("status");
  const groups = new Map();
  for (const row of found) {
    const key = `${rows.run[row]} ${valueOf(row, state.by)}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  // A run without a sampled cell has an answer too, from pairs of values; a text is searched in sampled cells only.
  const withCells = new Set(found.map((row) => rows.run[row]));
  const asked = wantedRuns().filter((run) => withCells.has(run) || (found.length && !state.text));
  asked.sort((one, other) => columnOf(one) - columnOf(other));
  const shownRuns = asked.filter((run) => servesAnything(run));
  drawServingNothing(asked.filter((run) => !servesAnything(run)), open);
  byId("overview").hidden = shownRuns.length === 0;
  const values = [...new Set(found.map((row) => valueOf(row, state.by)))].sort((one, other) => one - other);
  const body = values.map((value) => {
    const label = make("th", { scope: "row" }, axes[state.by].words[value]);
    const answers = shownRuns.map((run) => {
      const group = groups.get(`${run} ${value}`);
      const className = startOf(run, shownRuns);
      return make("td", { className }, group ? answerButton(run, value, together(group, extentOf(run, state.by, value)), open) : unsampledAnswer(run, value));
    });
    return make("tr", {}, label, ...answers);
  });
  const table = byId("overview");
  table.replaceChildren(overviewHead(shownRuns), make("tbody", {}, ...body));
  // Beside the first column, which stays, a device's name stays in view while its backends are.
  if (body.length) table.style.setProperty("--first", `${table.rows[0].cells[0].offsetWidth}px`);
  const narrowed = state.chosen.size || state.text;
  byId("overview-note").textContent =
    (narrowed ? "Only cells that pass the filters are counted. " : "") +
    "A sampled answer has the number of cells that were run: no other combination was. " +
    "A fraction counts the verified, compiled or refuted cells among the claimed ones. " +
    (runs.some((run) => run.sources.length) ? "A card or a version in an answer is that of another run of its backend. " : "") +
    "A corner marks a value that is not served with all others. Open an answer for its reasons; arrow keys move.";
  setStop(overviewButtons(), null);
  setStop([[...byId("nothing").querySelectorAll("button")]], null);
}

/** The place of a run: devices in the order of the data, and the runs of a device beside each other. */
function columnOf(run) {
  const field = FIELDS.find((each) => each.key === "device");
  return field.values.indexOf(runs[run].device) * runs.length + run;
}

function overviewHead(shownRuns) {
  const devices = new Map();
  for (const run of shownRuns) devices.set(runs[run].device, (devices.get(runs[run].device) ?? 0) + 1);
  const field = FIELDS.find((each) => each.key === "device");
  const above = [...devices].map(([device, colSpan], place) =>
    make("th", { scope: "colgroup", colSpan, className: place ? "start" : "" }, make("span", {}, wordsOf(field, device))),
  );
  const corner = make("td", { rowSpan: 2 });
  const names = shownRuns.map((run) => {
    // A card is named where the device's name alone leaves it open.
    const card = deviceNames(runs[run].device).length > 1 ? runs[run].deviceName : null;
    const origin = [runs[run].plugin, card].filter(Boolean).join(", ");
    const className = startOf(run, shownRuns);
    return make("th", { scope: "col", className }, runs[run].backend, origin ? make("small", {}, origin) : null);
  });
  return make("thead", {}, make("tr", {}, corner, ...above), make("tr", {}, ...names));
}

/** A line stands before the first backend of a device. */
function startOf(run, shownRuns) {
  const before = shownRuns[shownRuns.indexOf(run) - 1];
  return before !== undefined && runs[before].device !== runs[run].device ? "start" : "";
}

function answerButton(run, value, answer, open) {
  const { backend, device } = runs[run];
  const limits = limitsOf(run, state.by, value);
  const part = partOf(answer);
  const words = [axes[state.by].words[value], `${backend} on ${device}`, statuses[answer.status].word];
  if (part) words.push(part.replace("/", " of "));
  const few = statuses[answer.status].claimed ? restrictionOf(run, state.by, value) : null;
  if (few) words.push(few.words);
  const isStarred = limits.some((limit) => !few || limit.axis !== few.axis);
  if (answer.elsewhere) words.push(answer.elsewhere);
  if (limits.length) words.push(`not with ${plural(limits.length, "other value")}`);
  return make(
    "button",
    {
      type: "button",
      className: `answer is-${statusClass(answer.status)}${isStarred ? " limited" : ""}`,
      "aria-label": words.join(", "),
      onclick: () => open(shownName("answer", backend, device, axes[state.by].field, spelled(state.by, value))),
    },
    mark(answer.status),
    make("span", { className: "word" }, statuses[answer.status].word),
    part ? make("small", {}, part) : null,
    few ? make("small", { className: "few" }, few.words) : null,
    answer.elsewhere ? make("small", { className: "few" }, answer.elsewhere) : null,
  );
}

/** The answer to a value that no cell of the run has together with the filters. */
function unsampledAnswer(run, value) {
  const wanted = wantedValues().filter(([axis]) => axis !== state.by);
  const answer = answerByPairs(run, [...wanted, [state.by, value]]);
  if (!wanted.length || !answer.known) return make("span", { className: "not-asked" }, "not asked");
  const title = answer.served ? "not sampled: each two of these values are served" : `not sampled: ${answer.reasons.join("; ")}`;
  return make("span", { className: "not-asked", title }, `not sampled: ${answer.served ? "declared" : "refused"}`);
}

/** Whether any cell of a run is not refused. */
function servesAnything(run) {
  const refused = statuses.findIndex((status) => status.word === "refused");
  return runs[run].findings.some((number, at) => at % 3 === 1 && number !== refused);
}

/** The backends that serve nothing on a device, a line for each device. */
function drawServingNothing(without, open) {
  const devices = new Map();
  for (const run of without) devices.set(runs[run].device, [...(devices.get(runs[run].device) ?? []), run]);
  const lines = [...devices].map(([device, there]) => {
    const buttons = there.map((run) => {
      const onclick = () => open(shownName("run", runs[run].backend, device));
      return make("button", { type: "button", className: "small", onclick }, runs[run].backend);
    });
    return make("li", {}, make("span", {}, `Nothing is served on ${device} by`), ...buttons);
  });
  byId("nothing").replaceChildren(...lines);
}
