"use strict";
// What the page shows, read once: a row is one finding of one run, by its number in these columns.

const data = JSON.parse(document.getElementById("data").textContent);
const { axes, runs, statuses } = data;
const rows = readRows();
const [VERIFIED, SAMPLED] = ["verified", "sampled"].map((word) => statuses.findIndex((status) => status.word === word));

/** The columns of all rows: what is wrong or open first, refusals last, otherwise in the order of the runs. */
function readRows() {
  const all = [];
  runs.forEach((run, runNumber) => {
    const sourceOf = new Map(run.sources.flatMap(({ cells }, source) => cells.map((cell) => [cell, source])));
    for (let at = 0; at < run.findings.length; at += 3) {
      const cell = run.findings[at];
      all.push([runNumber, cell, run.findings[at + 1], run.findings[at + 2], sourceOf.get(cell) ?? -1]);
    }
  });
  const order = ["refuted", "not run", "unclaimed", "verified", "compiled", "declared", "refused"];
  const placeOf = statuses.map((status) => order.indexOf(status.word));
  all.sort((one, other) => placeOf[one[2]] - placeOf[other[2]]);
  const column = (place) => Int32Array.from(all, (row) => row[place]);
  return { count: all.length, run: column(0), cell: column(1), status: column(2), why: column(3), source: column(4) };
}

/** The number of a row's value on an axis. */
function valueOf(row, axis) {
  return data.cells[rows.cell[row] * axes.length + axis];
}

/** The value as an address spells it. */
function spelled(axis, value) {
  return String(axes[axis].values[value] ?? "none");
}

/** The reasons or the evidence of a row, as texts. */
function reasonsOf(why) {
  return data.whys[why].map((number) => data.reasons[number]);
}

/** What names a cell everywhere: "sinks/decode/d128/bfloat16/auto/b16/NHD". */
function cellId(cell) {
  const at = (axis) => axes[axis].values[data.cells[cell * axes.length + axis]];
  const pages = at(5) === null ? ["direct"] : [`b${at(5)}`, at(6)];
  return [at(0), at(1), `d${at(2)}`, at(3), at(4), ...pages].join("/");
}

/**
 * What several rows say together: the strongest status, how many have each, and the reasons. Verified cells are a sample,
 * unless `isWhole` says that every combination was run; `lacking` has the words for values that were not.
 */
function together(found, { isWhole = false, lacking = "" } = {}) {
  const counts = new Array(statuses.length).fill(0);
  for (const row of found) counts[rows.status[row]] += 1;
  const strongest = data.strongest.find((each) => counts[each]);
  const status = strongest === VERIFIED && !isWhole ? SAMPLED : strongest;
  const claimed = counts.reduce((sum, count, each) => sum + (statuses[each].claimed ? count : 0), 0);
  const same = found.filter((row) => rows.status[row] === strongest);
  const reasons = reasonsTogether(statuses[status].word, same.map((row) => data.whys[rows.why[row]]));
  return { status, counts, claimed, lacking, reasons, elsewhere: elsewhereIn(same) };
}

/** Of refusals the reasons that all give, or the fewest; of anything else each that is given. */
function reasonsTogether(word, whys) {
  if (word !== "refused") return [...new Set(whys.flat())].map((number) => data.reasons[number]);
  const shortest = whys.reduce((one, other) => (other.length < one.length ? other : one));
  const common = shortest.filter((reason) => whys.every((why) => why.includes(reason)));
  return (common.length ? common : shortest).map((number) => data.reasons[number]);
}

/** How many of the claimed cells were verified, compiled or refuted, where not all were: "3/40"; of a sample what was run. */
function partOf(answer) {
  const isSample = answer.status === SAMPLED;
  if (isSample && answer.lacking) return answer.lacking;
  const ran = isSample || ["verified", "compiled", "refuted"].includes(statuses[answer.status].word);
  const number = answer.counts[isSample ? VERIFIED : answer.status];
  if (ran && number !== answer.claimed) return `${number}/${answer.claimed}`;
  return isSample ? plural(number, "cell") : "";
}

/** The other sources of some rows of a run: "on NVIDIA H200", or "also on NVIDIA H200" where the run itself has some. */
function elsewhereIn(found) {
  const places = new Set(found.map((row) => rows.source[row]));
  const words = runs[rows.run[found[0]]].sources.filter((_, source) => places.has(source)).map((source) => source.words);
  return words.length && places.has(-1) ? `also ${words.join(" and ")}` : words.join(" and ");
}

/** The run with the card, versions and date of one of its sources; the run itself for -1. */
function withSource(run, source) {
  return source < 0 ? run : { ...run, ...run.sources[source] };
}

/** A run's versions as texts: "torch 2.11.0". */
function versionsOf(run) {
  return Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
}

/** What a run tried of a value, or with -1 twice of everything; filters that leave one cell leave the whole of it. */
function extentOf(run, axis, value) {
  const fixed = new Set([...wantedValues().map(([each]) => each), axis].filter((each) => each >= 0));
  const isHere = ([one, its]) => one === axis && its === value;
  return {
    isWhole: fixed.size === axes.length || runs[run].whole.some(isHere),
    lacking: runs[run].lacking.find(isHere)?.[2] ?? "",
  };
}

/** The axis of which a value is served with few values, and the words: "fp8_e5m2 only"; null without one. */
function restrictionOf(run, axis, value) {
  const found = runs[run].restrictions.find(([one, its]) => one === axis && its === value);
  return found ? { axis: found[2], words: found[3] } : null;
}

/** What a value of an axis is not served with, though each is served with others. */
function limitsOf(run, axis, value) {
  const found = [];
  const { limits } = runs[run];
  for (let at = 0; at < limits.length; at += 5) {
    const [one, its, other, others, why] = limits.slice(at, at + 5);
    if (one === axis && its === value) found.push({ axis: other, value: others, why });
    if (other === axis && others === value) found.push({ axis: one, value: its, why });
  }
  return found;
}
