// Everything together: the state is drawn whole after each change, which takes milliseconds.

function draw() {
  drawFilters();
  drawChips(changed);
  drawOverview(open);
  drawCells(open);
  drawDetail(changed);
}

function changed() {
  writeAddress();
  draw();
}

/** Show the view that the address asks for, in the state that it names. */
function show() {
  const given = new URLSearchParams(location.hash.slice(1));
  const asksModel = given.has("model") || given.has("gpu") || given.has("kv") || given.get("view") === "model";
  const isModel = Boolean(models) && (asksModel || !runs.length);
  byId("model").hidden = !isModel;
  byId("matrix").hidden = isModel;
  byId("to-model").hidden = !models || isModel;
  byId("to-matrix").hidden = !runs.length || !isModel;
  byId("title").textContent = isModel ? byId("to-model").textContent : document.title;
  if (isModel) {
    readModelAddress(given);
    drawModel();
  } else {
    readAddress(given);
    draw();
  }
}

function open(shown) {
  state.shown = shown;
  writeAddress(true);
  drawDetail(changed);
}

function drawAbout() {
  const devices = new Set(runs.map((run) => run.device));
  const backends = new Set(runs.map((run) => run.backend));
  const what = `${plural(rows.count, "cell")} of ${plural(backends.size, "backend")} on ${plural(devices.size, "device")}`;
  byId("about").textContent = `The layers that attention backends claim to serve, and the results of running them: ${what}.`;
  const items = runs.flatMap((run) =>
    [run, ...run.sources.map((_, source) => withSource(run, source))].map((each, place) => {
      const also = place ? `, another run with ${plural(each.cells.length, "cell")}` : "";
      const words = [run.source, ...originOf(each)].join(", ");
      return make("li", {}, make("b", {}, run.backend), ` on ${run.device}${also}: ${words}`);
    }),
  );
  byId("runs").append(...items);
}

buildFilters(changed);
buildOverview(changed);
buildDetail();
buildModel();
makeOneStop(byId("cells"), cellButtons);
drawAbout();
byId("main").hidden = false;
show();
addEventListener("popstate", show);
