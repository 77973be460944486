// What a person reads and does: tooltips, keys, mouse, selection.
const NEVER = 255;
const WORST_FIRST = [CRITICAL, 2, 1, NO_DATA, CRITICAL | AFFECTED, 2 | AFFECTED, 1 | AFFECTED];
const FILTERS = ["critical", "degraded", "watch", "affected", "drained", "no_data", "ok"];

function matches(filter, look) {
  if (filter === "affected") return (look & AFFECTED) > 0;
  if (filter === "drained") return (look & DRAINED) > 0;
  return !(look & AFFECTED) && ["ok", "watch", "degraded", "critical", "no_data"][look & 7] === filter;
}

function shortName(entity) {
  return entity.slice(entity.indexOf(":") + 1);
}

function groupName(view, box) {
  if (!box.entity) return `no ${view.data.by}`;
  const name = shortName(box.entity);
  return view.data.by === "rack" ? name : `${box.entity.slice(0, box.entity.indexOf(":"))} ${name}`;
}

function ageText(age) {
  if (age === NEVER) return "no data yet";
  if (age === 0) return "data less than 30 s old";
  if (age < 60) return `last data ${age} s ago`;
  if (age < 120) return `last data ${age - 59} min ago`;
  return age === 254 ? "last data days ago" : `last data ${age - 119} h ago`;
}

function stateText(view, i) {
  const look = view.fleet.looks[i], drained = look & DRAINED ? ", DRAINED" : "";
  const word = view.data.words[look & 7].toUpperCase() + drained;
  if (look & AFFECTED) return `AFFECTED (${word} fault elsewhere)`;
  return view.unknown ? `LAST KNOWN: ${word}` : word;
}

function valueText(view, i) {
  const scale = view.data.scale;
  if (!view.fleet.levels || !scale) return "";
  const level = view.fleet.levels[i];
  if (level === UNKNOWN) return `${scale.label}: no value`;
  const part = level / TOP;
  const value = scale.logarithmic
    ? (scale.low * (scale.high / scale.low) ** part).toExponential(0)
    : `${scale.diverging ? signed(scale.low + (scale.high - scale.low) * part) : Math.round(scale.low + (scale.high - scale.low) * part)}`;
  const beyond = level === 0 ? (scale.logarithmic || scale.diverging ? "at most " : "") : level === TOP ? "at least " : "";
  return `${scale.label}: ${beyond}${value}${scale.unit === "1" ? "" : ` ${scale.unit}`}`;
}

function signed(value) {
  const rounded = Math.abs(value) < 10 ? value.toFixed(1) : value.toFixed(0);
  return value > 0 ? `+${rounded}` : rounded.replace("-", "−");
}

function lines(view, i) {
  const box = boxOf(view.placed, i);
  const found = [`node ${shortName(view.names[i])} - ${stateText(view, i)}`, `${groupName(view, box)} · ${ageText(view.fleet.ages[i])}`];
  const value = valueText(view, i), set = view.fleet.incidents[i];
  if (value) found.push(value);
  if (set > 0) {
    const ids = set < 255 ? view.data.incident_sets[set - 1] : [];
    found.push(ids.length === 1 ? `incident ${ids[0]}` : ids.length ? `${ids.length} incidents` : "incidents");
  }
  if (view.fleet.looks[i] & SIMULATED) found.push("SIMULATED");
  return found;
}

function groupLines(view, box) {
  const counts = {};
  for (let i = box.first; i < box.first + box.count; i++) {
    const word = FILTERS.find((filter) => matches(filter, view.fleet.looks[i]));
    counts[word] = (counts[word] ?? 0) + 1;
  }
  const parts = FILTERS.filter((word) => counts[word]).map((word) => `${counts[word]} ${word.replace("_", " ")}`);
  const cause = view.causes.has(box.entity) ? ["cause of an open incident"] : [];
  return [groupName(view, box), ...cause, parts.join(", "), box.entity ? "click: select, double-click: show only this" : "click: select"];
}

function showTip(view, text, at) {
  const { tip, map } = view;
  if (!text) { tip.style.display = "none"; return; }
  tip.textContent = text.join("\n");
  tip.style.display = "block";
  const top = view.box.offsetTop + at.y - view.top + (at.height ?? view.placed.cellHeight) + 8;
  tip.style.left = `${Math.max(0, Math.min(at.x, map.clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${top}px`;
}

function tipAt(view, found) {
  if (!found) showTip(view, null);
  else if (found.cell >= 0) showTip(view, lines(view, found.cell), positionOf(view.placed, found.cell));
  else showTip(view, groupLines(view, found.box), { x: found.box.x, y: found.box.y, height: HEAD });
}

function pointOf(view, event) {
  const edge = view.canvas.getBoundingClientRect();
  return { x: event.clientX - edge.left, y: event.clientY - edge.top + view.top - 2 };
}

function nextWorst(view) {
  const { looks } = view.fleet;
  const alike = (look, wanted) => (look & 15) === wanted;
  const wanted = WORST_FIRST.find((state) => looks.some((look) => alike(look, state)));
  for (let k = 1; wanted !== undefined && k <= looks.length; k++) {
    const i = (Math.max(view.focus, -1) + k) % looks.length;
    if (alike(looks[i], wanted)) return i;
  }
  return view.focus;
}

function select(view, cells, add) {
  // All selected if `add` is false; toggles one cell, adds several.
  if (!add) view.selected.clear();
  if (add && cells.length === 1 && view.selected.has(cells[0])) view.selected.delete(cells[0]);
  else for (const cell of cells) view.selected.add(cell);
  view.chosen();
}

function groupCells(box) {
  return Array.from({ length: box.count }, (_, k) => box.first + k);
}

function onKey(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !view.placed?.cells) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key.startsWith("Arrow")) {
    const before = view.focus;
    view.focus = before < 0 ? 0 : neighbour(view.placed, before, key);
    if (event.shiftKey) select(view, [before < 0 ? 0 : before, view.focus], true);
  } else if (key === "n") view.focus = nextWorst(view);
  else if (key === "Home" || key === "End") view.focus = key === "Home" ? 0 : view.placed.cells - 1;
  else if (key === " " && view.focus >= 0) select(view, [view.focus], true);
  else if (key === "g" && view.focus >= 0) select(view, groupCells(boxOf(view.placed, view.focus)), event.shiftKey);
  else if (key === "Escape") { showTip(view, null); if (view.selected.size) select(view, [], false); event.preventDefault(); return; }
  else if (key === "Enter" && view.focus >= 0) { showTip(view, null); view.open(view.focus); return; }
  else if (key === "+" || key === "=") view.zoomBy(1);
  else if (key === "-") view.zoomBy(-1);
  else if (key === "0") view.zoomBy(-view.zoom);
  else return;
  event.preventDefault();
  if (view.focus < 0 || view.focus >= view.placed.cells) return;
  reveal(view);
  paint(view);
  showTip(view, lines(view, view.focus), positionOf(view.placed, view.focus));
  view.said.textContent = lines(view, view.focus).join(", ") + (view.selected.has(view.focus) ? ", selected" : "");
}

function reveal(view) {
  // Scrolls the map so that the focused cell is in view.
  const { y } = positionOf(view.placed, view.focus), { box } = view;
  if (y < box.scrollTop + 4) box.scrollTop = Math.max(0, y - HEAD - 8);
  else if (y + view.placed.cellHeight > box.scrollTop + box.clientHeight - 8) box.scrollTop = y + view.placed.cellHeight - box.clientHeight + 24;
  view.top = box.scrollTop;
}

function listenToMouse(view) {
  const { canvas } = view;
  let pressed = null;
  canvas.onpointerdown = (event) => {
    if (event.button !== 0 || !view.placed) return;
    pressed = { ...pointOf(view, event), id: event.pointerId, mouse: event.pointerType === "mouse" };
  };
  canvas.onpointermove = (event) => {
    if (!view.placed) return;
    const at = pointOf(view, event);
    if (pressed?.mouse && (view.drag || Math.abs(at.x - pressed.x) + Math.abs(at.y - pressed.y) > 5)) {
      if (!view.drag) canvas.setPointerCapture(pressed.id);
      view.drag = {
        left: Math.min(at.x, pressed.x), right: Math.max(at.x, pressed.x),
        top: Math.min(at.y, pressed.y), bottom: Math.max(at.y, pressed.y),
      };
      showTip(view, null);
      paint(view);
      return;
    }
    const found = hit(view.placed, at.x, at.y);
    canvas.classList.toggle("over", Boolean(found));
    tipAt(view, found);
  };
  canvas.onpointerup = (event) => {
    if (!pressed || !view.placed) return;
    const drag = view.drag, touched = !pressed.mouse;
    pressed = view.drag = null;
    if (drag) { select(view, cellsIn(view.placed, drag), event.shiftKey); paint(view); return; }
    const at = pointOf(view, event);
    onClick(view, hit(view.placed, at.x, at.y), event.shiftKey || event.ctrlKey || event.metaKey, touched);
  };
  canvas.onpointercancel = () => { pressed = view.drag = null; paint(view); };
  canvas.onpointerleave = (event) => { if (!view.drag && event.pointerType === "mouse") showTip(view, null); };
  canvas.ondblclick = (event) => {
    const at = pointOf(view, event), found = hit(view.placed, at.x, at.y);
    if (found && found.cell < 0 && found.box.entity) view.narrow(found.box.entity);
  };
  canvas.onblur = () => showTip(view, null);
}

function onClick(view, found, add, touched) {
  if (!found) return;
  if (found.cell < 0) { select(view, groupCells(found.box), add); tipAt(view, found); return; }
  if (add) { view.focus = found.cell; select(view, [found.cell], true); return; }
  if (touched && view.focus !== found.cell) { // the first touch shows, the second opens
    view.focus = found.cell;
    paint(view);
    tipAt(view, found);
    return;
  }
  view.open(found.cell);
}
