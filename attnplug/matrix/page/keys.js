// Arrow keys: a table or a list of buttons is one stop of the Tab key, and the arrows move inside it.

/** Make the buttons of a container one stop, once; `rowsOf` gives them as rows, with null where there is none. */
function makeOneStop(container, rowsOf) {
  container.addEventListener("keydown", (event) => moveByKey(event, rowsOf()));
  container.addEventListener("focusin", (event) => setStop(rowsOf(), event.target));
}

/** Let the Tab key reach one button only: the given one, or the first. */
function setStop(buttons, wanted) {
  const all = buttons.flat().filter(Boolean);
  const stop = all.includes(wanted) ? wanted : all[0];
  for (const button of all) button.tabIndex = button === stop ? 0 : -1;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** Move the focus by an arrow, to a row's end by Home and End, and to the first or last row with Ctrl. */
function moveByKey(event, buttons) {
  if (event.altKey || event.metaKey || event.shiftKey) return;
  const row = buttons.findIndex((each) => each.includes(document.activeElement));
  if (row < 0) return;
  const column = buttons[row].indexOf(document.activeElement);
  const target = STEPS[event.key] ? nextButton(buttons, row, column, STEPS[event.key]) : endButton(event, buttons, row);
  if (!target) return;
  event.preventDefault();
  target.focus();
  target.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** The next button in a direction; places without a button are passed over. */
function nextButton(buttons, row, column, [down, right]) {
  if (buttons.every((each) => each.length === 1) && right) return nextButton(buttons, row, column, [right, 0]);
  for (let at = row + down, to = column + right; buttons[at] && to >= 0 && to < buttons[at].length; at += down, to += right) {
    if (buttons[at][to]) return buttons[at][to];
  }
  return null;
}

function endButton(event, buttons, row) {
  if (event.key !== "Home" && event.key !== "End") return null;
  const order = (list) => (event.key === "Home" ? list : [...list].reverse());
  const rows = event.ctrlKey ? order(buttons) : [buttons[row]];
  return rows.map((each) => order(each).find(Boolean)).find(Boolean);
}
