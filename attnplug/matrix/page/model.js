// The answer to "Which backend for my model?", looked up in the data for a model of the list or a pasted configuration.

const models = data.models;
const asked = { model: 0, gpu: 0, dtype: 0 };
/** The address's name for a pasted configuration, which itself never becomes part of an address. */
const OWN = "config.json";
const isOwn = () => asked.model === models.models.length;

/** Build the three choices once. */
function buildModel() {
  if (!models) return;
  const common = make("optgroup", { label: "Common" });
  const groups = [common];
  models.gpus.forEach((gpu, number) => {
    const text = gpu.arch ? `${gpu.name} (${gpu.device})` : gpu.name;
    const option = make("option", { value: number }, text);
    if (number < models.common) return common.append(option);
    const label = `${gpu.device.startsWith("sm") ? "NVIDIA" : "AMD"} ${gpu.arch}`;
    let group = groups.find((each) => each.label === label);
    if (!group) groups.push((group = make("optgroup", { label })));
    return group.append(option);
  });
  const option = (words) => (each, number) => make("option", { value: number }, each[words]);
  byId("choose").append(
    choice("model", "Model", [
      ...(pasted ? [option("name")({ name: "my own config.json" }, models.models.length)] : []),
      ...models.models.map(option("name")),
    ]),
    choice("gpu", "GPU", groups),
    choice("dtype", "KV cache dtype", models.dtypes.map(option("words"))),
  );
  byId("choose").addEventListener("submit", (event) => event.preventDefault());
  byId("copy").addEventListener("click", copyCommand);
  byId("config").addEventListener("input", drawModel);
}

function choice(key, label, options) {
  const choose = (event) => {
    asked[key] = Number(event.target.value);
    writeModelAddress();
    drawModel();
  };
  return make("label", {}, make("span", {}, label), make("select", { id: `choose-${key}`, onchange: choose }, ...options));
}

/** Take the choices from the address; what is unknown there keeps its default. */
function readModelAddress(given) {
  const [model, gpu, dtype] = models.start;
  const place = (list, test, start) => {
    const found = list.findIndex(test);
    return found < 0 ? list.findIndex(start) : found;
  };
  const key = (text) => (text ?? "").toLowerCase().replace(/[\s_-]/g, "");
  const named = key(given.get("gpu"));
  asked.model = place(models.models, (each) => each.name === given.get("model"), (each) => each.name === model);
  if (pasted && given.get("model") === OWN) asked.model = models.models.length;
  asked.gpu = place(models.gpus, (each) => named === each.key || named === each.device, (each) => each.key === gpu);
  asked.dtype = place(models.dtypes, (each) => each.key === given.get("kv"), (each) => each.key === dtype);
}

function writeModelAddress() {
  const given = new URLSearchParams();
  given.set("model", isOwn() ? OWN : models.models[asked.model].name);
  given.set("gpu", models.gpus[asked.gpu].key);
  given.set("kv", models.dtypes[asked.dtype].key);
  history.replaceState(null, "", `#${given}`);
}

/** Draw the answer to the three choices. */
function drawModel() {
  for (const [key, value] of Object.entries(asked)) byId(`choose-${key}`).value = value;
  const gpu = models.gpus[asked.gpu];
  const device = models.devices.indexOf(gpu.device);
  byId("own").hidden = !isOwn();
  const found = isOwn() ? pastedAnswer(byId("config").value, device) : null;
  const { layers } = found ?? models.models[asked.model];
  const text = found?.text ?? models.texts[models.answers[asked.model][device][asked.dtype]];
  byId("sentence").textContent = text.sentence.replace("{gpu}", gpu.said);
  byId("sentence").className = text.served || !gpu.arch ? "sentence" : "sentence warns";
  byId("command").textContent = text.command.replace("{gpu}", gpu.key);
  byId("copied").textContent = "";
  drawStrip(text, layers);
  const lines = [...text.notes, ...toInstall(text)];
  if (text.bytes) lines.push(`The KV cache takes at most ${sizeOf(text.bytes)} for each token, in all layers together.`);
  if (models.dtypes[asked.dtype].key === "fp8" && text.bytes !== 0 && text.dtype) {
    lines.push(`--kv-cache-dtype fp8 means fp8_e4m3, so the command names the format: ${text.dtype}.`);
  }
  byId("model-notes").replaceChildren(...lines.map((line) => make("li", {}, line)));
  byId("candidates").replaceChildren(...text.kinds.flatMap(candidateTables));
}

/** What to install for the backends of an answer. */
function toInstall(text) {
  const names = [...new Set(text.kinds.flatMap((kind) => kind.backends))];
  const needed = [...new Set(names.flatMap((name) => models.requires[name] ?? []))];
  return needed.length ? [`To install beside attnplug: pip install ${needed.map((each) => `'${each}'`).join(" ")}`] : [];
}

/** 49,152 as "48 KiB". */
function sizeOf(bytes) {
  const units = ["bytes", "KiB", "MiB"];
  let size = bytes;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${count(Math.round(size * 10) / 10)} ${units[unit]}`;
}

/** One cell for each layer; two rows where prefill and decode have different backends. */
function drawStrip(text, layers) {
  const split = text.kinds.some((kind) => kind.backends[0] !== kind.backends[1]);
  const phases = split ? ["prefill", "decode"] : [""];
  const rowsOf = text.kinds.length ? phases : [];
  const strips = rowsOf.map((phase, place) => {
    const cells = layers.map((kind, layer) => {
      const backend = text.kinds[kind].backends[place] ?? null;
      const title = `layer ${layer}: ${text.kinds[kind].words}, ${backend ?? "no backend"}`;
      return layerCell(backend, kind, { title });
    });
    const said = text.kinds.map((kind, number) => {
      const those = layers.filter((each) => each === number).length;
      return `${those} ${kind.words} on ${kind.backends[place] ?? "no backend"}`;
    });
    const label = `${phase ? `${phase}: ` : ""}${plural(layers.length, "layer")}: ${said.join("; ")}`;
    const strip = make("div", { className: "strip", role: "img", "aria-label": label }, ...cells);
    return make("div", { className: "strip-row" }, phase ? make("span", { className: "phase" }, phase) : null, strip);
  });
  byId("strip").replaceChildren(...strips);
  const legend = [];
  text.kinds.forEach((kind, number) => {
    const those = layers.filter((each) => each === number).length;
    [...new Set(kind.backends)].forEach((backend, place) => {
      const swatch = layerCell(backend, number, { "aria-hidden": "true" });
      const phase = kind.backends[0] === kind.backends[1] ? "" : ` in ${["prefill", "decode"][place]}`;
      const name = kind.reference === backend ? `${backend} (reference)` : backend;
      legend.push(make("li", {}, swatch, make("b", {}, name), `${phase}: ${plural(those, "layer")}, ${kind.words}`));
    });
    if (!kind.backends.length) legend.push(make("li", {}, make("b", {}, "no backend"), `: ${plural(those, "layer")}, ${kind.words}`));
  });
  byId("strip-legend").replaceChildren(...legend);
}

/** A layer as the letter and the colour of its backend. */
function layerCell(backend, kind, properties) {
  const letter = backend === null ? "–" : (models.letters[backend] ?? "?");
  const cell = make("span", { className: `layer kind-${kind % 3}`, ...properties }, letter);
  if (backend in models.colours) cell.style.setProperty("--tone", models.colours[backend]);
  else cell.classList.add("tone-none");
  return cell;
}

/** Each candidate for the layers of a kind with its verdict and its reasons. */
function candidateTables(kind) {
  return kind.tables.map((number) => {
    const { phase, rows: candidates } = models.tables[number];
    const body = candidates.map(([name, verdict, why]) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, name),
        make("td", { className: `verdict-${verdict}` }, verdict),
        make("td", {}, ...why.map((reason) => make("div", {}, models.reasons[reason]))),
      ),
    );
    const caption = make("caption", {}, `Layers: ${kind.words}${phase ? `, in ${phase}` : ""}`);
    return make("div", { className: "scroll" }, make("table", { className: "candidates" }, caption, make("tbody", {}, ...body)));
  });
}

/** Copy the command; a browser that forbids it gets the text selected instead. */
async function copyCommand() {
  const command = byId("command");
  try {
    await navigator.clipboard.writeText(command.textContent);
    byId("copied").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(command);
    byId("copied").textContent = "Selected: copy it with your keyboard";
  }
}
