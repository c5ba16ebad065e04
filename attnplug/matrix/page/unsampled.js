// Combinations that no cell samples. Each two values of an axis are in a cell, so a combination is answered by its pairs.

const pairsOfRun = new Map();

/** For each two values of a run: whether a cell with both is claimed, and else the shortest reasons against both. */
function pairsOf(run) {
  if (pairsOfRun.has(run)) return pairsOfRun.get(run);
  const pairs = new Map();
  const { findings } = runs[run];
  for (let at = 0; at < findings.length; at += 3) {
    const [cell, status, why] = findings.slice(at, at + 3);
    const values = data.cells.slice(cell * axes.length, (cell + 1) * axes.length);
    for (let one = 0; one < values.length; one += 1) {
      for (let other = one; other < values.length; other += 1) {
        const key = pairKey([one, values[one]], [other, values[other]]);
        const known = pairs.get(key);
        if (statuses[status].claimed) pairs.set(key, null);
        else if (known === undefined || (known !== null && data.whys[why].length < data.whys[known].length)) pairs.set(key, why);
      }
    }
  }
  pairsOfRun.set(run, pairs);
  return pairs;
}

const pairKey = ([axis, value], [other, its]) => `${axis}:${value}|${other}:${its}`;

/**
 * The answer of a run to values of several axes: it refuses them if it refuses any two of them.
 * `wanted` has pairs of an axis and a value, by their numbers. `known` is false where no layer has two of the values.
 */
function answerByPairs(run, wanted) {
  const pairs = pairsOf(run);
  const sorted = [...wanted].sort(([one], [other]) => one - other);
  let why = null;
  for (let one = 0; one < sorted.length; one += 1) {
    for (let other = one; other < sorted.length; other += 1) {
      const found = pairs.get(pairKey(sorted[one], sorted[other]));
      if (found === undefined) return { known: false, words: [sorted[one], sorted[other]].map(wordOf) };
      if (found !== null && (why === null || data.whys[found].length < data.whys[why].length)) why = found;
    }
  }
  return { known: true, served: why === null, reasons: why === null ? [] : reasonsOf(why) };
}

const wordOf = ([axis, value]) => `${axes[axis].name} ${axes[axis].words[value]}`;

/** The values that the filters name, as pairs of an axis and a value. */
function wantedValues() {
  const chosen = FIELDS.filter((field) => field.axis !== undefined && state.chosen.has(field.key));
  return chosen.map((field) => [field.axis, field.values.indexOf(state.chosen.get(field.key))]);
}

/** The runs that the filters of backend and device leave. */
function wantedRuns() {
  const passes = (key, value) => !state.chosen.has(key) || state.chosen.get(key) === value;
  return runs.map((_, run) => run).filter((run) => passes("backend", runs[run].backend) && passes("device", runs[run].device));
}

/** Whether the filters name a combination that no cell samples, and not only a status or a text that no cell has. */
function isUnsampled() {
  return wantedValues().length > 1 && !state.text && wantedRuns().length > 0 && !passing("status").length;
}

/** The answers to a combination that is not sampled, and the command that asks the classes themselves. */
function drawUnsampled() {
  const wanted = wantedValues();
  const served = statuses.findIndex((status) => status.word === "declared");
  const refused = statuses.findIndex((status) => status.word === "refused");
  const items = wantedRuns().map((run) => {
    const name = make("b", {}, `${runs[run].backend} on ${runs[run].device}`);
    const answer = answerByPairs(run, wanted);
    if (!answer.known) return make("li", {}, name, `no sampled layer has ${answer.words.join(" with ")}`);
    const words = answer.served ? "it serves each two of these values together" : answer.reasons.join("; ");
    return make("li", {}, name, badge(answer.served ? served : refused), make("span", {}, words));
  });
  const title = make("p", {}, make("b", {}, "Not sampled."), " No cell has exactly these values. The declarations say of each two of them:");
  const command = exactCommand(wanted);
  const exact = command && make("p", {}, "To ask the classes about exactly these values: ", make("code", {}, command));
  byId("none").replaceChildren(title, make("ul", { className: "unsampled" }, ...items), ...(exact ? [exact] : []));
}

/** `attnplug matrix --only ...` for the values, the others matching any; null where a name would need quoting. */
function exactCommand(wanted) {
  const letters = { head_size: "d", block_size: "b" };
  const valueOn = new Map(wanted);
  const part = (axis, number) => (valueOn.has(number) ? `${letters[axis.field] ?? ""}${spelled(number, valueOn.get(number))}` : "*");
  const direct = valueOn.has(5) && axes[5].values[valueOn.get(5)] === null;
  const parts = axes.map(part).slice(0, direct ? 5 : axes.length);
  const options = ["backend", "device"].filter((key) => state.chosen.has(key)).map((key) => [`--${key}`, state.chosen.get(key)]);
  const pattern = [...parts, ...(direct ? ["direct"] : [])].join("/");
  const plain = options.every(([, name]) => /^[\w+.:-]+$/.test(name)) && /^[\w*+./-]+$/.test(pattern);
  return plain ? `attnplug matrix ${options.map((each) => `${each.join(" ")} `).join("")}--only '${pattern}'` : null;
}
