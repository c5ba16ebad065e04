// The filters and what is open. The address has them behind "#", so that an address shows the same again.

const FIELDS = [
  { key: "backend", name: "backend", values: distinct((run) => run.backend), of: (row) => runs[rows.run[row]].backend },
  { key: "device", name: "device", values: distinct((run) => run.device), of: (row) => runs[rows.run[row]].device },
  ...axes.map((axis, number) => ({
    key: axis.field,
    name: axis.name,
    axis: number,
    values: axis.values.map((_, value) => spelled(number, value)),
    of: (row) => spelled(number, valueOf(row, number)),
  })),
];

const state = emptyState();

function emptyState() {
  return { chosen: new Map(), status: new Set(), text: "", by: 0, shown: null };
}

function distinct(of) {
  return [...new Set(runs.map(of))];
}

/** How a field's value reads: "sliding window" for sliding_window, "sm90 (NVIDIA H200)" for sm90. */
function wordsOf(field, value) {
  if (field.axis !== undefined) return axes[field.axis].words[field.values.indexOf(value)];
  if (field.key !== "device") return value;
  const names = deviceNames(value);
  return names.length ? `${value} (${names.join(", ")})` : value;
}

/** The names of a device's hardware in all runs and their sources. */
function deviceNames(device) {
  const all = runs.filter((run) => run.device === device).flatMap((run) => [run, ...run.sources]);
  return [...new Set(all.map((run) => run.deviceName).filter(Boolean))];
}

/** Take the state from the address; unknown names and values there are left out. */
function readAddress(given) {
  Object.assign(state, emptyState());
  for (const field of FIELDS) {
    const value = given.get(field.key);
    if (field.values.includes(value)) state.chosen.set(field.key, value);
  }
  for (const word of (given.get("status") ?? "").split(",")) {
    const status = statuses.findIndex((each) => each.word === word.replace("-", " "));
    if (status >= 0) state.status.add(status);
  }
  state.text = given.get("text") ?? "";
  state.by = Math.max(0, axes.findIndex((axis) => axis.field === given.get("by")));
  state.shown = given.get("show");
}

/** Put the state into the address: `step` makes it one that the browser's back button returns from. */
function writeAddress(step = false) {
  const given = new URLSearchParams();
  for (const [key, value] of state.chosen) given.set(key, value);
  if (state.status.size) given.set("status", [...state.status].map(statusClass).join(","));
  if (state.text) given.set("text", state.text);
  if (state.by) given.set("by", axes[state.by].field);
  if (state.shown) given.set("show", state.shown);
  const address = `#${given}`;
  if (address === (location.hash || "#")) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
}

/** What is shown as the address names it: a kind, and names which may hold anything. */
function shownName(kind, ...names) {
  return [kind, ...names.map((name) => name.replaceAll("%", "%25").replaceAll("|", "%7C"))].join("|");
}

/** The kind and the names again; none where the address is not one that this page has made. */
function shownParts() {
  try {
    return (state.shown ?? "").split("|").map(decodeURIComponent);
  } catch {
    return [];
  }
}

const searched = new Map();

/** Everything about a row that a search finds, in lower case. */
function textOf(row) {
  if (!searched.has(row)) {
    const { backend, device, deviceName } = withSource(runs[rows.run[row]], rows.source[row]);
    const words = axes.map((axis, number) => axis.words[valueOf(row, number)]);
    const parts = [backend, device, deviceName ?? "", cellId(rows.cell[row]), ...words, ...reasonsOf(rows.why[row])];
    searched.set(row, `${statuses[rows.status[row]].word} ${parts.join(" ")}`.toLowerCase());
  }
  return searched.get(row);
}

/** The rows that pass every filter but those left out: keys of fields, or "status". */
function passing(...leftOut) {
  const asked = FIELDS.filter((field) => state.chosen.has(field.key) && !leftOut.includes(field.key));
  const tests = asked.map((field) => {
    const value = state.chosen.get(field.key);
    return (row) => field.of(row) === value;
  });
  if (state.status.size && !leftOut.includes("status")) tests.push((row) => state.status.has(rows.status[row]));
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length) tests.push((row) => words.every((word) => textOf(row).includes(word)));
  const found = [];
  for (let row = 0; row < rows.count; row += 1) {
    if (tests.every((test) => test(row))) found.push(row);
  }
  return found;
}
