// Reads a config.json by the rules of `attnplug.integrations.known`, which come as data; what they do not know is refused.

/** Why the page does not read a configuration. */
class Refusal extends Error {}

/** The values of a JSON text. A number that is written as a float becomes a Number object, as Python tells 1.0 from 1. */
function exactly(text) {
  const marked = text.replace(/"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*/g, (token) =>
    token[0] !== '"' && /[.eE]/.test(token) ? `{"\\u0000float":${token}}` : token,
  );
  return JSON.parse(marked, (_, value) => (isObject(value) && Object.hasOwn(value, "\0float") ? Object(value["\0float"]) : value));
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Number);
const isNone = (value) => value === null || value === undefined;
const isNumber = (value) => (typeof value === "number" || value instanceof Number) && Number.isFinite(Number(value));
const inRange = (value, least, most) => least <= value && value <= most;
/** Whether Python calls it false. */
const isEmpty = (value) =>
  isNone(value) || value === false || value === "" || (isNumber(value) && Number(value) === 0) || (typeof value === "object" && !(value instanceof Number) && !Object.keys(value).length);

/** The checks of fields by the names that the data has for them. */
const CHECKS = {
  anything: () => true,
  either: (value, ...checks) => checks.some((check) => passes(check, value)),
  listed: (value, check, most) => Array.isArray(value) && value.length <= most && value.every((each) => passes(check, each)),
  number: (value, least, most) => isNumber(value) && inRange(value, least, most),
  one_of: (value, ...known) => known.some((each) => typeof each === typeof value && JSON.stringify(each) === JSON.stringify(value)),
  optional: (value, check) => isNone(value) || passes(check, value),
  quantization: (value, ...methods) => CHECKS.settings(value) && methods.includes(value.quant_method) && !saysCache(value),
  real: (value, least, most) => value instanceof Number && inRange(value, least, most),
  settings: (value) => isObject(value) && Object.values(value).every(isSetting),
  some: (value, check) => Array.isArray(value) && value.length > 0 && CHECKS.listed(value, check, 4096),
  text: (value) => typeof value === "string",
  whole: (value, least, most) => typeof value === "number" && Number.isInteger(value) && inRange(value, least, most),
};

const passes = ([name, ...limits], value) => CHECKS[name](value, ...limits);

function isSetting(value) {
  if (isObject(value)) return Object.values(value).every(isSetting);
  if (Array.isArray(value)) return value.length <= 4096 && value.every(isSetting);
  return value === null || ["string", "boolean"].includes(typeof value) || CHECKS.number(value, -1024, 1024);
}

/** Whether a quantizer says anything that may be about the KV cache, which only `attnplug select` reads. */
function saysCache(value) {
  if (typeof value !== "object" || value === null) return false;
  return Object.entries(value).some(([name, each]) => (/kv|cache|bmm|output/i.test(name) && !isEmpty(each)) || saysCache(each));
}

/** The layers of a configuration: their heads, sizes and kinds. Throws a Refusal. */
function layersOf(text, rules) {
  let given;
  try {
    given = exactly(text);
  } catch (problem) {
    throw new Refusal(`this is not JSON: ${problem.message}`);
  }
  if (!isObject(given)) throw new Refusal("a config.json is a JSON object");
  const named = given.model_type;
  const type = Object.hasOwn(rules.alike, named) && !isEmpty(given.architectures) ? rules.alike[named] : named;
  if (typeof named !== "string" || !Object.hasOwn(rules.families, type)) {
    throw new Refusal(`model_type ${JSON.stringify(named) ?? "is missing, and"} is none of those that this page reads`);
  }
  const family = rules.families[type];
  for (const [name, value] of Object.entries(given)) {
    const shown = JSON.stringify(value);
    if (!Object.hasOwn(family.fields, name)) throw new Refusal(`the rules for ${named} do not know the field ${name}`);
    if (!passes(rules.checks[family.fields[name]], value)) {
      throw new Refusal(`the rules for ${named} do not know ${name}=${shown.length > 60 ? `${shown.slice(0, 60)}…` : shown}`);
    }
  }
  for (const name of family.required) if (isNone(given[name])) throw new Refusal(`the field ${name} is missing`);
  if (!isNone(given.pad_token_id) && given.pad_token_id >= (given.vocab_size ?? 0)) throw new Refusal("pad_token_id is outside the vocabulary");
  if (!isEmpty(given.architectures) && !family.classes.includes(given.architectures[0])) {
    throw new Refusal(`the rules for ${named} do not know the class ${given.architectures[0]}`);
  }
  const found = READERS[family.read]({ ...family.defaults, ...given, model_type: type }, family.rule, rules);
  if (!found) throw new Refusal(`the rules for ${named} do not know these values together`);
  return { dtype: given.dtype || given.torch_dtype || "bfloat16", ...found };
}

const FULL = "full_attention";
const SLIDING = "sliding_attention";
const repeated = (count, kindOf) => Array.from({ length: count }, (_, index) => kindOf(index));
const headSize = (values) => (isEmpty(values.head_dim) ? Math.floor(values.hidden_size / values.num_attention_heads) : values.head_dim);

/** The functions of Python's rules by their names: the kind of each layer, the scale, and what else must hold. */
const FUNCTIONS = {
  full_layers: (values) => repeated(values.num_hidden_layers, () => FULL),
  every_layer(values) {
    const slides = !isNone(values.sliding_window) && (values.use_sliding_window ?? true);
    return repeated(values.num_hidden_layers, () => (slides ? SLIDING : FULL));
  },
  late_layers(values) {
    const slides = values.use_sliding_window && !isNone(values.sliding_window);
    const given = values.layer_types;
    if (!isNone(given)) return slides || !given.includes(SLIDING) ? given : null;
    const first = slides ? values.max_window_layers : values.num_hidden_layers;
    return repeated(values.num_hidden_layers, (index) => (index >= first ? SLIDING : FULL));
  },
  all_but_each(values, pattern) {
    const every = values.sliding_window_pattern ?? pattern;
    return values.layer_types ?? repeated(values.num_hidden_layers, (index) => ((index + 1) % every ? SLIDING : FULL));
  },
  llama4(values) {
    const { num_hidden_layers: layers, no_rope_layer_interval: interval } = values;
    const rotating = isEmpty(values.no_rope_layers) ? repeated(layers, (index) => ((index + 1) % interval ? 1 : 0)) : values.no_rope_layers;
    if (rotating.length !== layers) return null;
    return values.layer_types ?? rotating.map((rotates) => (rotates ? "chunked_attention" : FULL));
  },
  scale_of_size: (values) => headSize(values) ** -0.5,
  scale_of_gemma: (values) => values.query_pre_attn_scalar ** -0.5,
  scale_of_granite: (values) => Number(values.attention_multiplier),
  cohere2: (values) => (values.head_dim ?? headSize(values)) === Math.floor(values.hidden_size / values.num_attention_heads),
  gemma3(values, rules) {
    const { rope_scaling: old, rope_parameters: given } = values;
    const bases = ["rope_theta", "rope_local_base_freq"].filter((name) => Object.hasOwn(values, name));
    if (bases.some((name) => !CHECKS.number(values[name], 2, 1e12))) return false;
    if (!isNone(old) && (isEmpty(old) || !isObject(old))) return false;
    const ropes = isNone(given) ? { [FULL]: old ?? {}, [SLIDING]: {} } : given;
    if (!isObject(ropes) || Object.keys(ropes).sort().join() !== `${FULL},${SLIDING}` || !isEmpty(old) && !isEmpty(given)) return false;
    return Object.values(ropes).every((rope) => isObject(rope) && knownRope(rope, headSize(values), ["default", "linear"], rules));
  },
};

/** The rule of each family by the name of Python's; null where values do not go together. */
const READERS = {
  decoder(values, rule, rules) {
    if (rule.also && !FUNCTIONS[rule.also](values, rules)) return null;
    const heads = values.num_attention_heads;
    const size = headSize(values);
    const kvHeads = values.num_key_value_heads ?? heads;
    const experts = new Set(["num_experts", "num_local_experts"].filter((name) => Object.hasOwn(values, name)).map((name) => values[name]));
    if (values.hidden_size % heads || heads % kvHeads || experts.size > 1) return null;
    if ((values.num_experts_per_tok ?? 1) > Math.min(...experts, experts.size ? Infinity : 1)) return null;
    const share = values.partial_rotary_factor;
    if (rule.one_rope && !ropeOf(values, isNone(share) ? size : Math.trunc(size * share), rule.ropes, share, rules)) return null;
    const [name, ...more] = rule.kinds;
    const layers = FUNCTIONS[name](values, ...more);
    const window = values.sliding_window ?? 0;
    if (!layers || layers.length !== values.num_hidden_layers || size % 2 || (layers.includes(SLIDING) && !window)) return null;
    const scale = FUNCTIONS[rule.scale](values);
    if ((values.sliding_window_size ?? window) !== window || scale === 1) return null;
    const cap = rule.cap ? values[rule.cap] : null;
    const flags = [isNone(cap) ? "" : "cap", rule.sinks ? "sinks" : ""];
    const kinds = layers.map((kind) => kind.replace("_attention", ""));
    return { layers: kinds, heads, kvHeads, size, scale, flags, window, cap: isNone(cap) ? null : Number(cap), chunk: values.attention_chunk_size };
  },
  bert(values) {
    const found = equalHeads(values.num_attention_heads, values.hidden_size);
    return found && found.size > 1 ? { ...found, layers: repeated(values.num_hidden_layers, () => "encoder_only") } : null;
  },
  bloom(values) {
    const [heads, layers, width] = [["n_head", "num_attention_heads"], ["n_layer", "num_hidden_layers"], ["hidden_size", "n_embed"]].map((names) => {
      const given = new Set(names.filter((name) => Object.hasOwn(values, name)).map((name) => values[name]));
      return given.size === 1 ? [...given][0] : null;
    });
    const found = heads && layers && width ? equalHeads(heads, width) : null;
    return found && { ...found, layers: repeated(layers, () => "full"), flags: ["ALiBi"] };
  },
  whisper(values) {
    const encoder = equalHeads(values.encoder_attention_heads, values.d_model);
    const decoder = equalHeads(values.decoder_attention_heads, values.d_model);
    if (!encoder || !decoder || encoder.size === 1 || decoder.size === 1) return null;
    if ((values.num_hidden_layers ?? values.encoder_layers) !== values.encoder_layers) return null;
    // The grid has one head size for all layers.
    const size = encoder.size === decoder.size ? encoder.size : `${encoder.size}/${decoder.size}`;
    const layers = [...repeated(values.encoder_layers, () => "encoder"), ...repeated(2 * values.decoder_layers, (index) => (index % 2 ? "cross" : "full"))];
    return { ...decoder, size, layers };
  },
  latent(values, _, rules) {
    const { num_attention_heads: heads, qk_nope_head_dim: nope, qk_rope_head_dim: rotating } = values;
    const rope = ropeOf(values, rotating, ["default", "yarn"], values.partial_rotary_factor, rules);
    if (!rope || (values.head_dim ?? rotating) !== rotating || (values.qk_head_dim ?? nope + rotating) !== nope + rotating) return null;
    if (values.model_type === "deepseek_v2" && values.hidden_size % heads) return null;
    if ((values.num_key_value_heads ?? heads) !== heads || (values.index_head_dim ?? rotating) < rotating) return null;
    const size = [heads, values.kv_lora_rank, rotating, nope, values.v_head_dim].join("/");
    const raises = rope.rope_type !== "default" && !isEmpty(rope.mscale_all_dim) && rope.factor > 1;
    const raised = raises ? 0.1 * rope.mscale_all_dim * Math.log(rope.factor) + 1 : 1;
    const flags = isNone(values.index_topk) ? [] : [`topk${values.index_topk}`];
    return { layers: repeated(values.num_hidden_layers, () => "mla"), heads, kvHeads: 1, size, scale: (nope + rotating) ** -0.5 * raised ** 2, flags };
  },
};

function equalHeads(heads, width) {
  return width % heads ? null : { heads, kvHeads: heads, size: width / heads, scale: (width / heads) ** -0.5 };
}

/** The parameters of one rotary embedding, or null, as `rope_of` in Python. */
function ropeOf(values, size, kinds, share, rules) {
  const { rope_scaling: old, rope_parameters: given, rope_theta: theta } = values;
  if (size < 2 || size % 2 || [old, given].some((each) => !isNone(each) && isEmpty(each)) || !(isNone(old) || isNone(given))) return null;
  if (theta !== undefined && !CHECKS.number(theta, 2, 1e12)) return null;
  const found = old ?? given ?? {};
  if (!isObject(found)) return null;
  const { partial_rotary_factor: its = share ?? 1, ...rope } = found;
  return isNumber(its) && Number(its) === Number(share ?? 1) ? knownRope(rope, size, kinds, rules) : null;
}

function knownRope({ type: legacy = null, ...given }, size, kinds, rules) {
  const rope = { rope_type: legacy ?? "default", ...given };
  const kind = rope.rope_type;
  if (!kinds.includes(kind) || (legacy !== null && legacy !== kind)) return null;
  const { required, checks } = rules.ropes[kind];
  if (required.some((name) => !Object.hasOwn(rope, name))) return null;
  for (const [name, value] of Object.entries(rope)) {
    if (name !== "rope_type" && !(Object.hasOwn(checks, name) && passes(checks[name], value))) return null;
  }
  if (kind === "llama3" && rope.high_freq_factor < rope.low_freq_factor) return null;
  if (kind === "longrope" && !(rope.short_factor.length === size / 2 && rope.long_factor.length === size / 2)) return null;
  return rope;
}
