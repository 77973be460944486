// How cells look. A look is colour and shape: cause = full cell (critical: outlined), affected = half a cell,
// no data = hollow with a slash, drained = blue (if nothing is wrong) with two slashes, simulated = cut corner.
const OK = 0, BLUE = 5, CRITICAL = 3, NO_DATA = 4, AFFECTED = 8, SIMULATED = 16, DRAINED = 32;
const UNKNOWN = 255, TOP = 250;
const BATCH = 512; // cells of one path. Measured: 64 to 20,000 are alike
const STATE_VARIABLES = ["ok", "watch", "degraded", "critical", "no-data", "drained"];
const FONT = "'Source Sans', 'Source Sans Pro', sans-serif";
// cividis: Nunez, Anderton, Renslow (2018); equal for people with and without colour vision deficiency
const CIVIDIS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];

function colours(element) {
  // the browser resolves light-dark() only in an applied colour, so each variable is applied to a probe
  const probe = document.createElement("span");
  element.append(probe);
  const get = (name) => {
    probe.style.color = `var(--fp-${name})`;
    return getComputedStyle(probe).color;
  };
  const found = {
    state: STATE_VARIABLES.map(get),
    text: [get("ok-ink"), get("watch-ink"), get("degraded-ink"), get("critical-ink"), get("muted"), get("ink")],
    line: get("critical-line"), noData: get("no-data"), simulated: get("simulated"), ground: get("ground"),
    muted: get("muted"), ink: get("ink"), box: get("line"), accent: get("accent"), surface: get("surface"),
  };
  probe.remove();
  return found;
}

function levelColours(scale, colour) {
  const rgb = (text) => (text[0] === "#" ? [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)) : text.match(/[\d.]+/g).map(Number));
  const stops = (scale.diverging ? ["#0072b2", "#7fb8d8", colour.state[OK], "#f0b860", "#d55e00"] : CIVIDIS).map(rgb);
  return Array.from({ length: TOP + 1 }, (_, level) => {
    const at = (level / TOP) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    const mixed = stops[low].slice(0, 3).map((v, c) => Math.round(v + (stops[low + 1][c] - v) * (at - low)));
    return `rgb(${mixed.join(",")})`;
  });
}

function paint(view) {
  const { canvas, placed } = view;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = Math.min(placed.height + 4, view.most);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.translate(0, 2 - view.top);
  paintAll(g, view, view.top - 2, view.top + height);
  if (view.drag) paintDrag(g, view);
}

function paintAll(g, view, top, bottom) {
  const { placed } = view;
  g.textBaseline = "middle";
  const shown = placed.boxes.filter((box) => box.y + box.height >= top && box.y <= bottom);
  for (const box of shown) paintGroup(g, box, view);
  paintFills(g, shown, view);
  paintMarks(g, marksOf(shown, view), view);
  if (view.focus >= 0 && view.focus < placed.cells) paintFocus(g, view);
}

function paintGroup(g, box, view) {
  const { placed, colour } = view;
  const cause = view.causes.has(box.entity);
  if (!placed.head) {
    if (placed.margin && box.begins) {
      g.font = `11px ${FONT}`;
      g.fillStyle = colour.muted;
      g.fillText(box.entity ? shortName(box.entity) : groupName(view, box), 0, box.y + Math.min(box.height / 2, 10), MARGIN - 8);
    }
    if (cause) frame(g, box.x - 1.5, box.y - 1.5, box.width + 3, box.height + 3, 0, colour.state[CRITICAL], 2);
    return; // too small for a frame and a name: only the gap separates groups
  }
  g.fillStyle = colour.surface;
  g.beginPath();
  g.roundRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, 5);
  g.fill();
  frame(g, box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, 5, cause ? colour.state[CRITICAL] : colour.box, cause ? 2 : 1);
  g.font = `600 12px ${FONT}`;
  const name = groupName(view, box);
  g.fillStyle = cause ? colour.ink : colour.muted;
  let left = box.x + PAD + 1;
  if (cause) { // a filled triangle: the fault is the group itself
    g.fillStyle = colour.state[CRITICAL];
    g.beginPath();
    g.moveTo(left, box.y + 15); g.lineTo(left + 10, box.y + 15); g.lineTo(left + 5, box.y + 6);
    g.fill();
    g.fillStyle = colour.ink;
    left += 14;
  }
  g.fillText(name, left, box.y + HEAD / 2 + 1, Math.max(1, box.x + box.width - PAD - left));
  paintSimulated(g, box, view, left + g.measureText(name).width + 10);
}

function paintSimulated(g, box, view, left) {
  let simulated = 0;
  for (let i = box.first; i < box.first + box.count; i++) simulated += (view.fleet.looks[i] & SIMULATED) > 0;
  if (!simulated) return;
  g.font = `700 9px ${FONT}`;
  g.fillStyle = view.colour.simulated;
  const room = box.x + box.width - PAD - left;
  const part = simulated === box.count ? "SIMULATED" : `${simulated} SIMULATED`;
  const label = g.measureText(part).width <= room ? part : "SIM";
  if (g.measureText(label).width > room) return; // then only the cut corners mark simulated nodes
  g.fillText(label, box.x + box.width - PAD - g.measureText(label).width, box.y + HEAD / 2 + 1);
}

function fillOf(view, i) {
  // The fill of a cell as a number: levels as they are, states from 256 on; -1 for a hollow cell.
  const look = view.fleet.looks[i] & 7;
  if (look === NO_DATA) return -1;
  if (view.fleet.levels) return view.fleet.levels[i] === UNKNOWN ? -1 : view.fleet.levels[i];
  if (view.unknown && look === OK) return -1; // while the state is unknown no cell is shown as healthy
  const own = view.fleet.looks[i] & AFFECTED ? OK : look;
  return 256 + (own === OK && view.fleet.looks[i] & DRAINED ? BLUE : own);
}

function inBatches(g, cells, end, add) {
  // One path for many cells: 12,500 strokes of their own take five times as long. A path of all cells is no faster.
  for (let from = 0; from < cells.length; from += BATCH) {
    g.beginPath();
    for (const cell of cells.slice(from, from + BATCH)) add(cell);
    end();
  }
}

function paintFills(g, boxes, view) {
  const { placed, colour } = view;
  const w = placed.cellWidth, h = placed.cellHeight, round = h >= 9 ? Math.min(4, h / 4) : 0;
  const byFill = new Map();
  for (const box of boxes) {
    for (let k = 0; k < box.count; k++) {
      const fill = fillOf(view, box.first + k);
      const list = byFill.get(fill) ?? byFill.set(fill, []).get(fill);
      list.push(cellAt(placed, box, k));
    }
  }
  for (const [fill, cells] of byFill) {
    g.fillStyle = fill < 0 ? (h < 4 ? colour.noData : colour.ground) : fill >= 256 ? colour.state[fill - 256] : view.levels[fill];
    const half = fill < 0 && h < 4; // at two pixels a hollow cell is a dot
    const wide = half ? Math.max(1, w / 2) : w, tall = half ? Math.max(1, h / 2) : h;
    if (round) inBatches(g, cells, () => g.fill(), ({ x, y }) => g.roundRect(x, y, w, h, round));
    else for (const { x, y } of cells) g.fillRect(x, y, wide, tall);
  }
}

function marksOf(boxes, view) {
  // The cells of each mark. Most cells have none.
  const { fleet, placed } = view;
  const found = { hollow: [], affected: new Map(), drained: [], simulated: [], critical: [], named: [], dimmed: [], selected: [] };
  const tall = placed.cellHeight, named = placed.cellWidth >= NAMED;
  for (const box of boxes) {
    for (let k = 0; k < box.count; k++) {
      const i = box.first + k, look = fleet.looks[i], state = look & 7, hollow = fillOf(view, i) < 0;
      const dimmed = view.state && !matches(view.state, look), selected = view.selected.has(i);
      if (state === OK && !hollow && !(look & (DRAINED | SIMULATED)) && !dimmed && !named && !selected) continue;
      const cell = { i, ...cellAt(placed, box, k) };
      if (hollow && tall >= 4) found.hollow.push(cell);
      else if (look & AFFECTED && !fleet.levels) (found.affected.get(state) ?? found.affected.set(state, []).get(state)).push(cell);
      if (look & DRAINED && tall >= 4) found.drained.push(cell);
      if (look & SIMULATED && tall >= 7) found.simulated.push(cell);
      if (state === CRITICAL && !(look & AFFECTED)) found.critical.push(cell);
      if (named) found.named.push(cell);
      if (dimmed) found.dimmed.push(cell);
      if (selected) found.selected.push(cell);
    }
  }
  return found;
}

function paintMarks(g, marks, view) {
  // Each mark for all its cells, in the order in which they cover each other.
  const { placed, colour } = view;
  const w = placed.cellWidth, h = placed.cellHeight, round = Math.min(4, h / 4);
  slash(g, marks.hollow, w, h, h >= 9 ? round : 0, colour);
  for (const [state, cells] of marks.affected) halve(g, cells, w, h, round, colour.state[state]);
  strike(g, marks.drained, w, h, colour.ink);
  cutCorners(g, marks.simulated, w, h, colour.simulated);
  frames(g, marks.critical, 0, w, h, h >= 9 ? round : 0, colour.line, h > 9 ? 2 : h > 3 ? 1.2 : 1);
  for (const { i, x, y } of marks.named) paintName(g, i, x, y, w, h, view);
  g.fillStyle = colour.ground;
  g.globalAlpha = 0.82;
  for (const { x, y } of marks.dimmed) g.fillRect(x - 1, y - 1, w + 2, h + 2);
  g.globalAlpha = 1;
  frames(g, marks.selected, 0.5, w, h, round, colour.accent, h > 6 ? 2.5 : 1.5);
}

function frame(g, x, y, w, h, round, stroke, thick) {
  g.strokeStyle = stroke;
  g.lineWidth = thick;
  g.beginPath();
  if (round) g.roundRect(x, y, w, h, round); else g.rect(x, y, w, h);
  g.stroke();
}

function frames(g, cells, out, w, h, round, stroke, thick) {
  // Frames of cells, `out` pixels outside of their edges.
  g.strokeStyle = stroke;
  g.lineWidth = thick;
  inBatches(g, cells, () => g.stroke(), ({ x, y }) => {
    if (round) g.roundRect(x - out, y - out, w + 2 * out, h + 2 * out, round);
    else g.rect(x - out, y - out, w + 2 * out, h + 2 * out);
  });
}

function slash(g, cells, w, h, round, colour) {
  frames(g, cells, -0.5, w, h, round, colour.noData, 1);
  if (h < 5) return; // a hollow square
  inBatches(g, cells, () => g.stroke(), ({ x, y }) => {
    g.moveTo(x + 1, y + h - 1);
    g.lineTo(x + w - 1, y + 1);
  });
}

function strike(g, cells, w, h, ink) {
  const wide = Math.min(w, h * 2) / 2;
  g.strokeStyle = ink;
  g.globalAlpha = 0.55;
  g.lineWidth = h >= 9 ? 1.5 : 1;
  inBatches(g, cells, () => g.stroke(), ({ x, y }) => {
    for (const shift of h >= 9 ? [-wide / 3, wide / 3] : [0]) {
      g.moveTo(x + w / 2 + shift - wide / 3, y + h - 1);
      g.lineTo(x + w / 2 + shift + wide / 3, y + 1);
    }
  });
  g.globalAlpha = 1;
}

function halve(g, cells, w, h, round, fill) {
  g.fillStyle = fill;
  const tall = Math.max(1, Math.round(h * 0.4));
  inBatches(g, cells, () => g.fill(), ({ x, y }) => {
    if (h >= 9) g.roundRect(x, y + h - tall, w, tall, [0, 0, round, round]);
    else g.rect(x, y + h - tall, w, tall);
  });
}

function cutCorners(g, cells, w, h, fill) {
  const cut = Math.min(8, h / 2.5);
  g.fillStyle = fill;
  inBatches(g, cells, () => g.fill(), ({ x, y }) => {
    g.moveTo(x + w - cut, y);
    g.lineTo(x + w, y);
    g.lineTo(x + w, y + cut);
  });
}

function paintName(g, i, x, y, w, h, view) {
  const { fleet, colour } = view;
  const name = shortName(view.names[i]), look = fleet.looks[i], state = look & 7, fill = fillOf(view, i);
  g.font = `${state === OK ? 400 : 650} 12px ${FONT}`;
  const wide = Math.min(g.measureText(name).width, w - 12);
  if (fill < 0) { // clear the slash behind the name
    g.fillStyle = colour.ground;
    g.fillRect(x + (w - wide) / 2 - 3, y + h / 2 - 7, wide + 6, 14);
  }
  g.fillStyle = fill < 0 ? colour.muted : fill < 256 ? inkOn(view.levels[fill]) : colour.text[fill - 256];
  g.textAlign = "center";
  g.fillText(name, x + w / 2, y + h / 2 + (look & AFFECTED && fill >= 256 ? -h / 6 : 1), w - 12);
  g.textAlign = "left";
}

function inkOn(fill) {
  const [red, green, blue] = fill.match(/[\d.]+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#17212b" : "#ffffff";
}

function paintFocus(g, { placed, focus, colour }) {
  const { x, y } = positionOf(placed, focus);
  frame(g, x - 2, y - 2, placed.cellWidth + 4, placed.cellHeight + 4, 5, colour.accent, 3);
}

function paintDrag(g, { drag, colour }) {
  g.fillStyle = colour.accent;
  g.globalAlpha = 0.15;
  g.fillRect(drag.left, drag.top, drag.right - drag.left, drag.bottom - drag.top);
  g.globalAlpha = 1;
  frame(g, drag.left, drag.top, drag.right - drag.left, drag.bottom - drag.top, 0, colour.accent, 1);
}
