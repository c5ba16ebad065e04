// The answer for a pasted config.json: its layers give a key of the grid, whose answers the selector computed.

const pasted = models?.pasted ? { ...models.pasted, rules: exactly(models.pasted.rules) } : null;

/** The text of an answer and the kind of each layer; a text without kinds says why there is no answer. */
function pastedAnswer(config, device) {
  const dtype = models.dtypes[asked.dtype].key;
  // Any answer has the command; the dtype is the one that the reader chose.
  const { command: another } = models.texts[pasted.rows[0][device][asked.dtype]];
  const command = another.replace(/(?<=--kv-cache-dtype )\S+/, dtype);
  const none = (sentence) => ({ layers: [], text: { sentence, command, served: false, kinds: [], notes: [], bytes: null, dtype: null } });
  if (!config.trim()) return none("Paste the config.json of your model above.");
  try {
    const found = layersOf(config, pasted.rules);
    const row = pasted.keys[keyOf(found)];
    if (row === undefined) throw new Refusal(`it has no answers for layers like these: ${keyOf(found)}`);
    return filled(models.texts[pasted.rows[row][device][asked.dtype]], found);
  } catch (problem) {
    if (!(problem instanceof Refusal)) throw problem;
    return none(`This page cannot answer for this file: ${problem.message}. The command below reads more.`);
  }
}

/** The key of a configuration's layers, as in `attnplug.matrix.pasted`. */
function keyOf({ layers, dtype, heads, kvHeads, size, scale, flags = [], window, cap, chunk }) {
  const within = (what, value, [least, most]) => {
    if (!inRange(value, least, most)) throw new Refusal(`its answers are for ${what} from ${least} to ${most}, and this is ${value}`);
  };
  const kinds = [...new Set(layers)];
  within("a scale", scale, pasted.scales);
  if (kinds[0] !== "mla") within("query heads for each KV head", heads / kvHeads, pasted.groups);
  if (flags.includes("cap")) within("a soft cap", cap, pasted.caps);
  if (kinds.includes("chunked") && chunk !== pasted.chunk) throw new Refusal(`its answers are for chunks of ${pasted.chunk}, and this is ${chunk}`);
  const range = pasted.windows.findIndex(([least, most]) => inRange(window, least, most));
  const words = kinds.map((kind) => (kind === "sliding" ? `sliding${range}` : kind));
  return [dtype, size, words.join("+"), ...flags].filter(Boolean).join(" ");
}

/** A text of the grid with the numbers of a configuration. */
function filled(text, { layers, kvHeads, window, cap }) {
  const kinds = [...new Set(layers)];
  const counts = kinds.map((kind) => layers.filter((each) => each === kind).length);
  const values = { ...counts, window, cap: cap && Number(cap.toPrecision(6)) };
  const fill = (words) => words.replace(/\{(\d|window|cap)\}/g, (_, name) => values[name]);
  const numbered = text.kinds.map((kind) => ({ ...kind, words: fill(kind.words) }));
  // Layers of encoders keep no cache; all others of a model keep as much for each KV head.
  const kept = (numbers) => kinds.reduce((sum, kind, place) => sum + (kind.startsWith("encoder") ? 0 : numbers[place]), 0);
  const ofGrid = kept(pasted.counts) * (kinds[0] === "mla" ? 1 : pasted.kvHeads);
  const bytes = text.bytes && (text.bytes / ofGrid) * kept(counts) * kvHeads;
  return { layers: layers.map((kind) => kinds.indexOf(kind)), text: { ...text, sentence: fill(text.sentence), kinds: numbered, bytes } };
}
