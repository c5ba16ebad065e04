// What stands behind an answer or a cell, in a dialog: its reasons or evidence, and where it was found.

/** Open what `state.shown` names, or close the dialog; a name that means nothing is dropped. */
function drawDetail(changed) {
  const dialog = byId("detail");
  const [kind, ...names] = shownParts();
  const content = { answer: answerDetail, cell: cellDetail, run: runDetail }[kind]?.(names, changed) ?? null;
  if (content === null) {
    state.shown = null;
    if (dialog.open) dialog.close();
    return;
  }
  const close = make("button", { type: "button", className: "close", "aria-label": "Close", onclick: () => dialog.close() }, "×");
  // Behind the heading, which has the focus first, so that the next stop of the keyboard is the way out.
  dialog.replaceChildren(content[0], close, ...content.slice(1));
  dialog.scrollTop = 0;
  if (!dialog.open) dialog.showModal();
}

/** Closing by Escape, the cross or a click beside it takes the name out of the address; the rest stays as drawn. */
function buildDetail() {
  const dialog = byId("detail");
  dialog.addEventListener("close", () => {
    if (state.shown === null) return;
    state.shown = null;
    writeAddress();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

function answerDetail([backend, device, field, value], changed) {
  const run = runs.findIndex((each) => each.backend === backend && each.device === device);
  const axis = axes.findIndex((each) => each.field === field);
  const number = axis < 0 ? -1 : axes[axis].values.findIndex((_, place) => spelled(axis, place) === value);
  const found = passing("status").filter((row) => rows.run[row] === run && valueOf(row, axis) === number);
  if (run < 0 || number < 0 || !found.length) return null;
  const list = () => {
    state.chosen.set("backend", backend).set("device", device).set(field, value);
    listCells(changed);
  };
  return answerContent(run, found, `${axes[axis].name}, ${backend} on ${device}`, {
    title: axes[axis].words[number],
    few: restrictionOf(run, axis, number),
    limits: limitsOf(run, axis, number),
    extent: extentOf(run, axis, number),
    list,
  });
}

function runDetail([backend, device], changed) {
  const run = runs.findIndex((each) => each.backend === backend && each.device === device);
  const found = passing("status").filter((row) => rows.run[row] === run);
  const list = () => {
    state.chosen.set("backend", backend).set("device", device);
    listCells(changed);
  };
  return found.length ? answerContent(run, found, `on ${device}`, { title: backend, limits: [], extent: extentOf(run, -1, -1), list }) : null;
}

function listCells(changed) {
  state.shown = null;
  changed();
  byId("cells-title").focus();
  byId("cells-title").scrollIntoView();
}

function answerContent(run, found, below, { title, few = null, limits, extent, list }) {
  const answer = together(found, extent);
  const counts = answer.counts.map((each, status) => (each ? `${count(each)} ${statuses[status].word}` : null));
  const button = make("button", { type: "button", className: "plain", onclick: list }, `List ${plural(found.length, "cell")}`);
  return [
    heading(title, below),
    verdict(answer.status, partOf(answer), statuses[answer.status].claimed ? few : null),
    reasonList(answer),
    limitList(limits),
    answerFacts(run, found, counts.filter(Boolean).join(", ")),
    make("p", { className: "actions" }, button),
  ].filter(Boolean);
}

/** The facts of the only source of an answer, else those of its run with a line for each other. */
function answerFacts(run, found, cells) {
  const claims = ["declared", "refused"];
  const tried = found.filter((row) => !claims.includes(statuses[rows.status[row]].word));
  const places = [...new Set(tried.map((row) => rows.source[row]))].sort((one, other) => one - other);
  const main = places[0] ?? -1;
  const others = places.slice(1).map((source) => {
    const number = tried.filter((row) => rows.source[row] === source).length;
    return ["other run", `${plural(number, "cell")}: ${originOf(withSource(runs[run], source)).join(", ")}`];
  });
  return facts(withSource(runs[run], main), [["cells", cells]], { others });
}

function cellDetail([backend, device, id]) {
  for (let row = 0; row < rows.count; row += 1) {
    const run = runs[rows.run[row]];
    if (run.backend === backend && run.device === device && cellId(rows.cell[row]) === id) return cellContent(row, run, id);
  }
  return null;
}

function cellContent(row, run, id) {
  const values = axes.map((axis, number) => [axis.name, axis.words[valueOf(row, number)]]);
  return [
    heading(axes[0].words[valueOf(row, 0)], `${run.backend} on ${run.device}`),
    verdict(rows.status[row], ""),
    reasonList({ status: rows.status[row], reasons: reasonsOf(rows.why[row]) }),
    facts(withSource(run, rows.source[row]), values, { id, again: againWith(run, row) }),
  ].filter(Boolean);
}

function heading(title, below) {
  return make("header", {}, make("h2", { id: "detail-title", tabIndex: -1, autofocus: true }, title), make("p", {}, below));
}

function verdict(status, part, few = null) {
  const meaning = make("span", {}, statuses[status].meaning);
  const only = few ? make("b", {}, few.words) : null;
  return make("p", { className: `verdict is-${statusClass(status)}` }, badge(status, part), meaning, only);
}

function reasonList({ status, reasons }) {
  if (!reasons.length) return null;
  const title = { refuted: "Evidence", refused: "Reasons" }[statuses[status].word] ?? "Why";
  const items = reasons.map((reason) => make("li", {}, reason));
  return make("section", {}, make("h3", {}, title), make("ul", { className: "reasons" }, ...items));
}

function limitList(limits) {
  if (!limits.length) return null;
  const groups = new Map();
  for (const { axis, value, why } of limits) {
    // Sizes that are refused in the same words stand in one line, with a gap where each has its own.
    const word = axes[axis].words[value];
    const text = reasonsOf(why).join("; ") || "not claimed";
    const key = `${axis} ${text.split(/\b/).map((part) => (part === word ? "…" : part)).join("")}`;
    if (!groups.has(key)) groups.set(key, { axis, words: [], text });
    groups.get(key).words.push(word);
  }
  const items = [...groups].map(([key, { axis, words, text }]) => {
    const said = words.length > 1 ? key.slice(key.indexOf(" ") + 1) : text;
    return make("li", {}, make("b", {}, `${axes[axis].name} ${words.join(", ")}`), `: ${said}`);
  });
  return make("section", {}, make("h3", {}, "Not together with"), make("ul", { className: "reasons" }, ...items));
}

/** The command that runs a claimed cell again, where the names in it need no quoting. */
function againWith(run, row) {
  const names = [run.backend, spelled(0, valueOf(row, 0))];
  if (!statuses[rows.status[row]].claimed || !names.every((name) => /^[\w+.-]+$/.test(name))) return null;
  return make("code", {}, `attnplug matrix --verify --backend ${names[0]} --feature ${names[1]}`);
}

/** The facts of a run, behind those of what was asked; whatever is not known is left out. */
function facts(run, asked, { id = null, again = null, others = [] } = {}) {
  const known = [
    ...asked,
    ["from", run.source],
    ["device", run.deviceName ? `${run.device}, ${run.deviceName}` : run.device],
    ["ran with", versionsOf(run).join(", ")],
    ["date", whenOf(run)],
    ["commit", run.commit?.slice(0, 12)],
    ...others,
    ["cell", id],
    ["run again", again],
  ].filter(([, value]) => value);
  return make("dl", {}, ...known.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

/** The card, versions and date of a run as texts. */
function originOf(run) {
  return [run.deviceName, ...versionsOf(run), whenOf(run)].filter(Boolean);
}

/** "2026-11-21 18:00 UTC". */
function whenOf(run) {
  const parts = /^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)/.exec(run.date);
  return parts ? `${parts[1]} ${parts[2]} UTC` : run.date;
}
