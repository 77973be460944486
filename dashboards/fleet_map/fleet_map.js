// One canvas for the whole fleet. Names come once with the layout (layout_store.js), values with every refresh.
function bytes(text) {
  if (!text) return null;
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text); // browsers since 2025
  const characters = atob(text), found = new Uint8Array(characters.length);
  for (let i = 0; i < found.length; i++) found[i] = characters.charCodeAt(i);
  return found;
}

function ranges(cells) {
  // [[first, last], ...]: a selection of a rack is one range, not 32 numbers.
  const sorted = [...cells].sort((a, b) => a - b), found = [];
  for (const cell of sorted) {
    const last = found[found.length - 1];
    if (last && last[1] === cell - 1) last[1] = cell; else found.push([cell, cell]);
  }
  return found;
}

function drawTiles(view) {
  const { data, map } = view;
  const row = map.querySelector(".tiles");
  FILTERS.forEach((filter, k) => {
    let tile = row.children[k];
    if (!tile) {
      tile = document.createElement("a");
      tile.append(document.createElement("i"), document.createElement("b"), document.createElement("span"));
      tile.append(document.createElement("small"));
      tile.setAttribute("role", "button");
      row.append(tile);
    }
    const count = data.counts[filter] ?? 0, pressed = view.state === filter;
    tile.href = data.hrefs[filter];
    tile.className = `tile ${filter.replace("_", "-")}${count ? "" : " none"}${data.unknown ? " unknown" : ""}`;
    tile.setAttribute("aria-pressed", String(pressed));
    tile.children[0].className = `swatch ${filter.replace("_", "-")}`;
    tile.children[1].textContent = count.toLocaleString("en-US");
    tile.children[2].textContent = data.tiles[k];
    tile.children[3].textContent = data.unknown ? "last known" : data.changes[filter] ?? "";
    tile.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser's own: a new tab
      event.preventDefault();
      view.filter(pressed ? "" : filter);
    };
    tile.onkeydown = (event) => { if (event.key === " ") { event.preventDefault(); tile.click(); } };
  });
}

function scaleEnds({ low, high, unit, logarithmic, diverging }) {
  const text = (value) => (logarithmic ? value.toExponential(0) : diverging ? signed(value) : String(value)) + (unit === "1" ? "" : ` ${unit}`);
  return [text(low), text(high)];
}

function drawScale(view) {
  const { data, map } = view;
  const box = map.querySelector(".scale");
  box.hidden = !data.scale;
  if (!data.scale) return;
  const { label } = data.scale, [low, high] = scaleEnds(data.scale);
  const strip = document.createElement("i"), stops = [0, 50, 100, 150, 200, 250].map((level) => view.levels[level]);
  strip.style.background = `linear-gradient(to right, ${stops.join(",")})`;
  box.replaceChildren(`${label}: ${low}`, strip, high);
}

function drawChosen(view) {
  const { map, selected, names } = view;
  const nodes = new Set([...selected].map((cell) => names[cell])).size;
  map.querySelector(".chosen").textContent = nodes ? `${nodes.toLocaleString("en-US")} ${nodes === 1 ? "node" : "nodes"} selected` : "";
  map.querySelector(".clear").hidden = !nodes;
}

function take(view, component) {
  // Data of a refresh into the view, which lives as long as the page: focus, zoom and selection survive.
  const { data } = component;
  const layout = globalThis.fleetpulseLayouts?.get(data.layout);
  view.data = data;
  view.unknown = data.unknown || document.documentElement.hasAttribute("data-fleetpulse-unknown");
  const looks = bytes(data.looks) ?? new Uint8Array(0), zeros = () => new Uint8Array(looks.length);
  view.fleet = { looks, ages: bytes(data.ages) ?? zeros(), levels: bytes(data.levels), incidents: bytes(data.incident_of) ?? zeros() };
  view.causes = new Set(data.causes);
  view.state = data.state;
  if (!layout || layout.names.length !== view.fleet.looks.length) { view.placed = null; return false; }
  if (view.layout !== data.layout) {
    const kept = new Set([...(view.selected ?? [])].map((cell) => view.names[cell]));
    const focused = view.names?.[view.focus];
    view.layout = data.layout;
    view.groups = layout.groups;
    view.names = layout.names;
    view.selected = new Set();
    if (kept.size) layout.names.forEach((name, i) => { if (kept.has(name)) view.selected.add(i); });
    view.focus = focused ? layout.names.indexOf(focused) : -1;
    view.width = 0;
  }
  adopt(view);
  return true;
}

function adopt(view) {
  // The selection of the address, once: `selection=rack:a05`, `selection=incident:ID`.
  const { data } = view;
  if (!data.selection || view.adopted === data.selection_id) return;
  view.adopted = data.selection_id;
  const wanted = new Set(data.selection), groups = new Set();
  view.selected.clear();
  for (const box of placeWith(view.groups, 1000, SIZES.length - 1).boxes) if (wanted.has(box.entity)) groupCells(box).forEach((cell) => groups.add(cell));
  view.names.forEach((name, i) => {
    const set = view.fleet.incidents[i], ids = set > 0 && set < 255 ? data.incident_sets[set - 1] : [];
    if (wanted.has(name) || groups.has(i) || ids.some((id) => wanted.has(`incident:${id}`))) view.selected.add(i);
  });
}

function redraw(view) {
  const { canvas, box, map } = view;
  if (!canvas.clientWidth || !view.names || !view.fleet || view.names.length !== view.fleet.looks.length) return;
  view.colour = colours(map);
  view.levels = view.data.scale ? levelColours(view.data.scale, view.colour) : null;
  view.most = mostHeight();
  if (!view.placed || view.width !== canvas.clientWidth) view.placed = place(view.groups, canvas.clientWidth - 4, view.zoom);
  view.width = canvas.clientWidth;
  const tall = view.placed.height + 4;
  box.style.height = `${Math.min(tall, view.most)}px`;
  map.querySelector(".space").style.height = `${tall}px`;
  map.querySelector(".out").disabled = view.placed.size >= SIZES.length - 1 || view.zoom <= 0;
  map.querySelector(".in").disabled = view.placed.size === 0;
  view.top = box.scrollTop;
  canvas.classList.toggle("stale", view.unknown);
  drawTiles(view);
  drawScale(view);
  drawChosen(view);
  paint(view);
  map.dataset.painted = String((Number(map.dataset.painted) || 0) + 1);
}

function connect(view, component) {
  const { map, box, canvas } = view;
  const { setTriggerValue, setStateValue } = component;
  view.open = (cell) => {
    const to = new URL(view.data.open, location.href);
    to.searchParams.set("entity", view.names[cell]);
    openAddress(map, to.href);
  };
  view.narrow = (entity) => setTriggerValue("narrowed", entity);
  view.filter = (filter) => { view.state = filter; redraw(view); setTriggerValue("filtered", filter || "none"); };
  view.chosen = () => {
    drawChosen(view);
    paint(view);
    setStateValue("selected", { layout: view.layout, ranges: ranges(view.selected) });
  };
  view.zoomBy = (steps) => {
    const before = view.placed.height;
    view.zoom = Math.max(0, Math.min(view.placed.fit, view.zoom + steps));
    view.placed = null;
    const middle = (view.box.scrollTop + view.box.clientHeight / 2) / before;
    redraw(view);
    box.scrollTop = middle * view.placed.height - box.clientHeight / 2;
  };
  map.querySelector(".clear").onclick = () => select(view, [], false);
  map.querySelector(".in").onclick = () => view.zoomBy(1);
  map.querySelector(".out").onclick = () => view.zoomBy(-1);
  map.querySelector(".fit").onclick = () => view.zoomBy(-view.zoom);
  map.querySelector(".png").onclick = () => savePicture(view);
  canvas.onkeydown = (event) => onKey(view, event);
  listenToMouse(view);
  box.onscroll = () => { view.top = box.scrollTop; if (view.placed) paint(view); };
  canvas.onwheel = (event) => {
    if (!event.ctrlKey || !view.placed) return; // without Ctrl the wheel scrolls
    event.preventDefault();
    view.zoomBy(event.deltaY < 0 ? 1 : -1);
  };
}

export default function (component) {
  const map = component.parentElement.querySelector(".map");
  // A refresh calls this again without ending the previous call: the view is kept on the element.
  const view = (map.fleetpulseView ??= {
    map, canvas: map.querySelector("canvas"), box: map.querySelector(".view"), tip: map.querySelector(".tip"),
    said: map.querySelector(".said"), focus: -1, zoom: 0, top: 0, drag: null, selected: new Set(),
  });
  if (map.fleetpulseEnd) map.fleetpulseEnd();
  connect(view, component);
  const show = () => { if (take(view, component)) redraw(view); };
  const again = () => { view.width = 0; redraw(view); };
  const resized = new ResizeObserver(() => { if (view.canvas.clientWidth !== view.width) again(); });
  resized.observe(map);
  const marked = new MutationObserver(() => { view.unknown = view.data.unknown || document.documentElement.hasAttribute("data-fleetpulse-unknown"); redraw(view); });
  marked.observe(document.documentElement, { attributes: true, attributeFilter: ["data-fleetpulse-unknown"] });
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", again);
  window.addEventListener("fleetpulse-layout", show);
  if (document.fonts.status !== "loaded") document.fonts.ready.then(() => { if (view.names) redraw(view); });
  show();
  map.fleetpulseEnd = () => {
    resized.disconnect();
    marked.disconnect();
    scheme.removeEventListener("change", again);
    window.removeEventListener("fleetpulse-layout", show);
  };
  return map.fleetpulseEnd;
}
