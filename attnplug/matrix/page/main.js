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

function open(shown) {
  state.shown = shown;
  writeAddress(true);
  drawDetail(changed);
}

function drawAbout() {
  const devices = new Set(runs.map((run) => run.device));
  const backends = new Set(runs.map((run) => run.backend));
  const what = `${plural(rows.count, "cell")} of ${plural(backends.size, "backend")} on ${plural(devices.size, "device")}`;
  byId("about").textContent = `What attention backends claim, and what running them has shown: ${what}.`;
  const items = runs.map((run) => {
    const ran = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
    const words = [run.source, ...ran, whenOf(run)].filter(Boolean).join(", ");
    return make("li", {}, make("b", {}, run.backend), ` on ${run.device}: ${words}`);
  });
  byId("runs").append(...items);
}

buildFilters(changed);
buildOverview(changed);
buildDetail();
drawAbout();
readAddress();
byId("main").hidden = false;
draw();
addEventListener("popstate", () => {
  readAddress();
  draw();
});
