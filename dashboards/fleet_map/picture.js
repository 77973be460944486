// The map as a picture to save or print: title, caption, all cells, legend.
const LEGEND = 26; // height of the legend (px)

const LOOK_OF = { watch: 1, degraded: 2, critical: CRITICAL, no_data: NO_DATA, affected: CRITICAL | AFFECTED, drained: DRAINED };

function paintSwatch(g, x, filter, view) {
  // One cell of 16 x 12 px, painted as the map paints it: while the state is unknown, healthy is hollow here too.
  const placed = { cellWidth: 16, cellHeight: 12, gap: 0, pad: 0, head: 0 }, boxes = [{ x, y: -6, first: 0, count: 1, columns: 1 }];
  const { colour, unknown } = view, fleet = { looks: [LOOK_OF[filter] ?? OK], levels: null };
  const sample = { colour, unknown, placed, fleet, state: "", selected: new Set() };
  paintFills(g, boxes, sample);
  paintMarks(g, marksOf(boxes, sample), sample);
}

function paintScale(g, view) {
  const { data, colour, levels } = view, [low, high] = scaleEnds(data.scale), from = `${data.scale.label}: ${low}`;
  const x = g.measureText(from).width + 8;
  g.fillStyle = colour.muted;
  g.fillText(from, 0, 0);
  for (let k = 0; k < 160; k++) {
    g.fillStyle = levels[Math.round((k / 159) * TOP)];
    g.fillRect(x + k, -6, 1, 12);
  }
  g.fillStyle = colour.muted;
  g.fillText(high, x + 168, 0);
}

function paintLegend(g, view) {
  const { data, colour } = view;
  g.font = `12px ${FONT}`;
  if (data.scale) { paintScale(g, view); return; }
  let x = 0;
  FILTERS.forEach((filter, k) => {
    if (!data.counts[filter]) return;
    const text = `${data.counts[filter].toLocaleString("en-US")} ${data.unknown ? "last known " : ""}${data.tiles[k]}`;
    paintSwatch(g, x, filter, view);
    g.fillStyle = colour.ink;
    g.fillText(text, x + 22, 0);
    x += 22 + g.measureText(text).width + 22;
  });
}

function savePicture(view) {
  // The whole map, not only what is in view, with its title and legend; 2 pixels a point for print.
  const width = view.canvas.clientWidth, height = view.placed.height + 60 + LEGEND;
  const most = 16_000; // pixels of one side that every browser can draw
  const ratio = Math.max(0.5, Math.min(2, most / Math.max(width + 20, height)));
  const sheet = document.createElement("canvas");
  sheet.width = Math.round((width + 20) * ratio);
  sheet.height = Math.round(height * ratio);
  const g = sheet.getContext("2d");
  g.scale(ratio, ratio);
  g.fillStyle = view.colour.ground;
  g.fillRect(0, 0, width + 20, height);
  g.translate(10, 0);
  g.textBaseline = "middle";
  g.fillStyle = view.colour.ink;
  g.font = `600 15px ${FONT}`;
  g.fillText(view.data.title, 0, 18, width);
  g.font = `12px ${FONT}`;
  g.fillStyle = view.colour.muted;
  g.fillText(view.data.caption, 0, 36, width);
  g.translate(0, 50);
  paintAll(g, { ...view, focus: -1, selected: new Set(view.selected) }, 0, view.placed.height);
  g.translate(0, view.placed.height + LEGEND / 2);
  paintLegend(g, view);
  sheet.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `fleet-${view.data.by}-${view.data.stamp}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }, "image/png");
}
