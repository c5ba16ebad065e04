// The list of cells that pass the filters, a hundred at a time.

const AT_ONCE = 100;
const listed = { found: [], count: 0 };

/** Draw the list anew; `open` shows a cell. */
function drawCells(open) {
  listed.found = passing();
  listed.count = 0;
  const number = plural(listed.found.length, "cell");
  byId("cells-title").textContent = listed.found.length === rows.count ? `All ${number}` : number;
  byId("said").textContent = `${number} shown`;
  const names = ["status", ...FIELDS.map((field) => field.name), "why"];
  const head = names.map((name) => make("th", { scope: "col", role: "columnheader" }, name));
  const body = make("tbody", { role: "rowgroup" });
  // Roles are said again: a phone's layout takes the table's display away, and with it what it is.
  byId("cells").replaceChildren(make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)), body);
  byId("cells").hidden = listed.found.length === 0;
  byId("none").hidden = listed.found.length > 0;
  byId("none").textContent = runs.length ? "No cell passes all of these filters." : "The matrix is empty.";
  if (isUnsampled()) drawUnsampled();
  byId("further").onclick = () => drawFurther().focus();
  body.onclick = (event) => {
    const row = event.target.closest("tr");
    // A text that is being marked to be copied is not a click on its row.
    if (row && getSelection().isCollapsed) open(row.dataset.shows);
  };
  drawFurther();
}

/** Draw the next rows, and give back the first one's button. */
function drawFurther() {
  const next = listed.found.slice(listed.count, listed.count + AT_ONCE).map(cellRow);
  byId("cells").tBodies[0].append(...next);
  listed.count += next.length;
  const first = next[0]?.querySelector("button");
  setStop(cellButtons(), listed.count > next.length ? first : null);
  const left = listed.found.length - listed.count;
  byId("further").hidden = left === 0;
  byId("further").textContent = `Show ${count(Math.min(left, AT_ONCE))} more of ${count(left)}`;
  return first;
}

/** The buttons of the listed cells, one in each row. */
function cellButtons() {
  return [...byId("cells").querySelectorAll(".open")].map((button) => [button]);
}

function cellRow(row) {
  const run = runs[rows.run[row]];
  const status = rows.status[row];
  const reasons = reasonsOf(rows.why[row]);
  const id = cellId(rows.cell[row]);
  const label = `${statuses[status].word}: ${run.backend} on ${run.device}, ${id}`;
  const button = make("button", { type: "button", className: "open", "aria-label": label }, badge(status));
  // What a filter has made the same in all rows is left out where there is little room.
  const cells = FIELDS.map((field) => {
    const words = field.axis === undefined ? field.of(row) : axes[field.axis].words[valueOf(row, field.axis)];
    const className = state.chosen.has(field.key) ? "same" : "";
    return make("td", { role: "cell", "data-name": field.name, className }, words);
  });
  const why = reasons.length > 1 ? `${reasons[0]}; and ${reasons.length - 1} more` : (reasons[0] ?? "");
  return make(
    "tr",
    { role: "row", "data-shows": shownName("cell", run.backend, run.device, id) },
    make("td", { role: "cell", className: "status" }, button),
    ...cells,
    make("td", { role: "cell", className: "why" }, make("span", {}, why)),
  );
}
