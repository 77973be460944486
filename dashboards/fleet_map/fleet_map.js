// One canvas for the whole fleet: cells shrink from named boxes to dots as it grows.
const OK = 0, NO_DATA = 4;
const WORST_FIRST = [3, 2, 1, NO_DATA]; // critical, degraded, watch, no data
const STATE_VARIABLES = ["ok", "watch", "degraded", "critical", "no-data"];
const MOST_HEIGHT = 430; // leaves room for the open incidents at 1440 x 900; chosen
const SIZES = [[58, 30], [26, 20], [20, 16], [15, 12], [11, 9], [8, 7], [6, 6], [5, 5], [4, 4]]; // width, height
const NAMED = 46; // narrowest cell in which a node's name is readable
const RACK_GAP = 12, PAD = 6, HEAD = 20, NEVER = 65535;

function bytes(text, Kind) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Kind(raw.buffer);
}

function decode(data) {
  return {
    names: data.names,
    states: bytes(data.states, Uint8Array),
    simulated: bytes(data.simulated, Uint8Array),
    ages: bytes(data.ages, Uint16Array),
  };
}

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
    text: [get("ok-ink"), get("watch-ink"), get("degraded-ink"), get("critical-ink"), get("muted")],
    line: get("critical-line"), noData: get("no-data"), simulated: get("simulated"), ground: get("ground"),
    muted: get("muted"), ink: get("ink"), box: get("line"), accent: get("accent"), surface: get("surface"),
  };
  probe.remove();
  return found;
}

function place(racks, width) {
  for (const [cell, height] of SIZES) {
    const placed = placeWith(racks, width, cell, height);
    if (placed.height <= MOST_HEIGHT || cell === SIZES[SIZES.length - 1][0]) return placed;
  }
  return placeWith(racks, width, 4, 4);
}

function placeWith(racks, width, cell, height) {
  const gap = cell > 10 ? 3 : 1, pad = cell > 10 ? PAD : cell > 7 ? 3 : 0, head = cell > 7 ? HEAD : 0;
  const rackGap = cell > 10 ? RACK_GAP : 6;
  const largest = Math.max(1, ...racks.map(([, count]) => count));
  const columns = largest <= 4 ? largest : cell > 30 || largest <= 32 ? 4 : 8;
  const least = columns * (cell + gap) - gap + 2 * pad;
  const across = Math.max(1, Math.min(racks.length, Math.floor((width + rackGap) / (least + rackGap))));
  // Racks share the width, so that the right edge is straight.
  const rackWidth = Math.min(least * 1.9, (width + rackGap) / across - rackGap);
  const cellWidth = (rackWidth - 2 * pad + gap) / columns - gap;
  const boxes = [], cells = [];
  let y = 0, index = 0;
  for (let first = 0; first < racks.length; first += across) {
    const row = racks.slice(first, first + across);
    const lines = Math.ceil(Math.max(...row.map(([, count]) => count)) / columns);
    const boxHeight = head + lines * (height + gap) - gap + pad;
    row.forEach(([name, count], k) => {
      const x = k * (rackWidth + rackGap);
      boxes.push({ name, x, y, width: rackWidth, height: boxHeight, first: index, count });
      for (let i = 0; i < count; i++, index++) {
        cells.push({ x: x + pad + (i % columns) * (cellWidth + gap), y: y + head + Math.floor(i / columns) * (height + gap) });
      }
    });
    y += boxHeight + rackGap;
  }
  return { boxes, cells, cellWidth, cellHeight: height, head, height: Math.max(y - rackGap, 24) };
}

function paint(view) {
  const { canvas, fleet, placed, colour } = view;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(placed.height * ratio);
  canvas.style.height = `${placed.height}px`;
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, placed.height);
  g.textBaseline = "middle";
  for (const box of placed.boxes) paintRack(g, box, view);
  for (let i = 0; i < placed.cells.length; i++) paintCell(g, i, view);
  if (view.focus >= 0 && view.focus < fleet.names.length) paintFocus(g, view);
}

function paintRack(g, box, { fleet, placed, colour }) {
  if (placed.head < HEAD) return; // too small for a frame and a name: only the gap separates racks
  g.fillStyle = colour.surface;
  g.strokeStyle = colour.box;
  g.lineWidth = 1;
  g.beginPath();
  g.roundRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, 5);
  g.fill();
  g.stroke();
  g.font = "600 12px 'Source Sans', 'Source Sans Pro', sans-serif";
  g.fillStyle = colour.muted;
  const name = box.name || "no rack";
  g.fillText(name, box.x + PAD + 1, box.y + HEAD / 2 + 1, box.width - 2 * PAD);
  let simulated = 0;
  for (let i = box.first; i < box.first + box.count; i++) simulated += fleet.simulated[i];
  if (!simulated) return;
  const room = box.width - 2 * PAD - g.measureText(name).width - 10;
  g.font = "700 9px 'Source Sans', 'Source Sans Pro', sans-serif";
  g.fillStyle = colour.simulated;
  const part = simulated === box.count ? "SIMULATED" : `${simulated} SIMULATED`;
  const label = g.measureText(part).width <= room ? part : "SIM";
  if (g.measureText(label).width > room) return; // then only the cut corners mark simulated nodes
  g.fillText(label, box.x + box.width - PAD - g.measureText(label).width, box.y + HEAD / 2 + 1);
}

function paintCell(g, i, { fleet, placed, colour }) {
  const { x, y } = placed.cells[i];
  const w = placed.cellWidth, h = placed.cellHeight, state = fleet.states[i];
  const round = Math.min(4, h / 4);
  g.beginPath();
  g.roundRect(x, y, w, h, round);
  if (state === NO_DATA) {
    g.fillStyle = colour.ground;
    g.fill();
    g.strokeStyle = colour.noData;
    g.lineWidth = 1;
    g.stroke();
    g.beginPath();
    g.moveTo(x + 1, y + h - 1);
    g.lineTo(x + w - 1, y + 1);
    g.stroke();
  } else {
    g.fillStyle = colour.state[state];
    g.fill();
  }
  if (fleet.simulated[i] && h >= 7) {
    const cut = Math.min(8, h / 2.5);
    g.fillStyle = colour.simulated;
    g.beginPath();
    g.moveTo(x + w - cut, y);
    g.lineTo(x + w, y);
    g.lineTo(x + w, y + cut);
    g.fill();
  }
  if (state === 3) {
    g.strokeStyle = colour.line;
    g.lineWidth = h > 9 ? 2 : 1.2;
    g.beginPath();
    g.roundRect(x, y, w, h, round);
    g.stroke();
  }
  if (w >= NAMED) paintName(g, i, x, y, w, h, fleet, colour);
}

function paintName(g, i, x, y, w, h, fleet, colour) {
  const name = fleet.names[i].slice(fleet.names[i].indexOf(":") + 1);
  const state = fleet.states[i];
  g.font = `${state === OK ? 400 : 650} 12px 'Source Sans', 'Source Sans Pro', sans-serif`;
  const wide = g.measureText(name).width;
  if (state === NO_DATA) { // clear the slash behind the name
    g.fillStyle = colour.ground;
    g.fillRect(x + (w - Math.min(wide, w - 12)) / 2 - 3, y + h / 2 - 7, Math.min(wide, w - 12) + 6, 14);
  }
  g.fillStyle = colour.text[state];
  g.textAlign = "center";
  g.fillText(name, x + w / 2, y + h / 2 + 1, w - 12);
  g.textAlign = "left";
}

function paintFocus(g, { placed, focus, colour }) {
  const { x, y } = placed.cells[focus];
  g.strokeStyle = colour.accent;
  g.lineWidth = 3;
  g.beginPath();
  g.roundRect(x - 2, y - 2, placed.cellWidth + 4, placed.cellHeight + 4, 5);
  g.stroke();
}

function words(seconds) {
  if (seconds === NEVER) return "no data yet";
  if (seconds < 60) return `last data ${seconds} s ago`;
  if (seconds < 3600) return `last data ${Math.floor(seconds / 60)} min ago`;
  return `last data ${Math.floor(seconds / 3600)} h ago`;
}

function lines(view, i) {
  const { fleet, data, placed } = view;
  const box = placed.boxes.find((b) => i >= b.first && i < b.first + b.count);
  const count = data.incidents[i] || 0;
  const found = [
    `${fleet.names[i].replace(":", " ")} - ${data.words[fleet.states[i]].toUpperCase()}`,
    `rack ${box.name || "unknown"} · ${words(fleet.ages[i])}`,
  ];
  if (count) found.push(count === 1 ? "1 incident: click to open" : `${count} incidents: click to list`);
  if (fleet.simulated[i]) found.push("SIMULATED");
  return found;
}

function showTip(view, i) {
  const { tip, placed, map } = view;
  if (i < 0) { tip.style.display = "none"; return; }
  tip.textContent = lines(view, i).join("\n");
  tip.style.display = "block";
  const { x, y } = placed.cells[i];
  const left = Math.min(x, map.clientWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${y + placed.cellHeight + 8}px`;
}

function at(view, event) {
  const frame = view.canvas.getBoundingClientRect();
  const x = event.clientX - frame.left, y = event.clientY - frame.top;
  const { cells, cellWidth, cellHeight } = view.placed;
  return cells.findIndex((c) => x >= c.x && x < c.x + cellWidth && y >= c.y && y < c.y + cellHeight);
}

function neighbour(view, key) {
  // The nearest cell that lies in the arrow's direction; sideways distance counts double.
  const { cells } = view.placed;
  if (view.focus < 0) return 0;
  const from = cells[view.focus];
  const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
  let best = view.focus, least = Infinity;
  cells.forEach((cell, i) => {
    const along = (cell.x - from.x) * dx + (cell.y - from.y) * dy;
    const aside = Math.abs((cell.x - from.x) * dy) + Math.abs((cell.y - from.y) * dx);
    if (along > 0.5 && along + 2 * aside < least) { least = along + 2 * aside; best = i; }
  });
  return best;
}

function nextWorst(view) {
  const { states } = view.fleet;
  const wanted = WORST_FIRST.find((state) => states.includes(state));
  if (wanted === undefined) return view.focus;
  for (let k = 1; k <= states.length; k++) {
    const i = (Math.max(view.focus, -1) + k) % states.length;
    if (states[i] === wanted) return i;
  }
  return view.focus;
}

function onKey(view, event, open) {
  if (event.ctrlKey || event.metaKey || event.altKey || !view.fleet.names.length) return;
  if (event.key.startsWith("Arrow")) view.focus = neighbour(view, event.key);
  else if (event.key === "n" || event.key === "N") view.focus = nextWorst(view);
  else if (event.key === "Escape") { showTip(view, -1); return; }
  else if (event.key === "Enter" && view.focus >= 0) { showTip(view, -1); open(view.focus); return; }
  else return;
  event.preventDefault();
  paint(view);
  showTip(view, view.focus);
  if (view.focus >= 0) view.said.textContent = lines(view, view.focus).join(", ");
}

export default function (component) {
  const { parentElement, data, setTriggerValue } = component;
  const map = parentElement.querySelector(".map"), canvas = map.querySelector("canvas");
  const view = {
    map, canvas, data, tip: map.querySelector(".tip"), said: map.querySelector(".said"),
    fleet: decode(data), focus: map.fleetpulseFocus ?? -1, // the focus survives a refresh
  };
  const open = (i) => setTriggerValue("picked", view.fleet.names[i]);
  const redraw = () => {
    if (!canvas.clientWidth) return;
    view.colour = colours(map);
    view.placed = place(data.racks, canvas.clientWidth);
    paint(view);
  };
  canvas.classList.toggle("stale", data.stale);
  canvas.onmousemove = (event) => {
    const i = at(view, event);
    canvas.classList.toggle("over", i >= 0);
    showTip(view, i);
  };
  canvas.onmouseleave = () => showTip(view, -1);
  canvas.onblur = () => showTip(view, -1);
  canvas.onclick = (event) => { const i = at(view, event); if (i >= 0) open(i); };
  canvas.onkeydown = (event) => { onKey(view, event, open); map.fleetpulseFocus = view.focus; };
  if (map.fleetpulseEnd) map.fleetpulseEnd(); // a refresh calls this again without ending the previous call
  const resized = new ResizeObserver(redraw);
  resized.observe(map);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);
  document.fonts.ready.then(redraw);
  redraw();
  map.fleetpulseEnd = () => { resized.disconnect(); scheme.removeEventListener("change", redraw); };
  return map.fleetpulseEnd;
}
