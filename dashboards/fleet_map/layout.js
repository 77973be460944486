// Where cells are: groups flow in rows, cells shrink from named boxes to dots as the fleet grows.
const SIZES = [[58, 30], [40, 24], [26, 20], [20, 16], [15, 12], [11, 9], [8, 7], [6, 6], [5, 5], [4, 4], [3, 3], [2, 2]];
const NAMED = 46; // narrowest cell in which a node's name is readable
const LABELLED = 7; // least height of a cell whose group has a frame and a name
const PAD = 6, HEAD = 20;
const MARGIN = 52; // left of rows whose groups have no room for a name: the name of the first one

function mostHeight() {
  // leaves room for the open incidents at 1440 x 900, and for the tiles on a phone; chosen
  return window.innerWidth < 700 ? 330 : 430;
}

function place(groups, width, zoom) {
  // The largest cells with which all fit, then `zoom` sizes larger.
  let fit = SIZES.length - 1;
  for (let k = 0; k < SIZES.length; k++) {
    if (placeWith(groups, width, k).height <= mostHeight()) { fit = k; break; }
  }
  const size = Math.max(0, Math.min(SIZES.length - 1, fit - zoom));
  return { ...placeWith(groups, width, size), fit, size };
}

function placeWith(groups, width, size) {
  const [least, height] = SIZES[size];
  const gap = least > 10 ? 3 : least > 3 ? 1 : 0;
  const pad = least > 10 ? PAD : height >= LABELLED ? 3 : 0;
  const head = height >= LABELLED ? HEAD : 0;
  const between = least > 10 ? 12 : least > 3 ? 6 : 3;
  const largest = Math.max(1, ...groups.map(([, count]) => count));
  const margin = head || groups.length < 2 || width < 600 ? 0 : MARGIN;
  width -= margin;
  const smallest = Math.min(largest, ...groups.map(([, count]) => count));
  const even = smallest * 2 >= largest || largest <= 64;
  const room = Math.max(1, Math.floor((width - 2 * pad + gap) / (least + gap)));
  const columnsOf = (count) => {
    if (largest <= 4) return Math.max(1, Math.min(largest, room));
    if (largest <= 64) return Math.min(room, least > 30 || largest <= 32 ? 4 : 8);
    return Math.max(1, Math.min(room, Math.ceil(Math.sqrt((even ? largest : count) * 3))));
  };
  const stretch = even ? stretched(columnsOf(largest), groups.length, width, least, gap, pad, between) : least;
  return flow(groups, { width, margin, cellWidth: stretch, cellHeight: height, gap, pad, head, between, columnsOf });
}

function stretched(columns, number, width, least, gap, pad, between) {
  // Equal groups share the width, so that the right edge is straight.
  const narrowest = columns * (least + gap) - gap + 2 * pad;
  const across = Math.max(1, Math.min(number, Math.floor((width + between) / (narrowest + between))));
  const box = Math.min(narrowest * 1.9, (width + between) / across - between);
  const cell = (box - 2 * pad + gap) / columns - gap;
  return Math.max(1, least < 5 ? Math.floor(cell) : cell);
}

function flow(groups, how) {
  const { width, margin, cellWidth, cellHeight, gap, pad, head, between, columnsOf } = how;
  const boxes = [];
  let x = 0, y = 0, tallest = 0, first = 0;
  for (const [entity, count] of groups) {
    const columns = columnsOf(count), rows = Math.ceil(count / columns);
    const wide = columns * (cellWidth + gap) - gap + 2 * pad, tall = head + rows * (cellHeight + gap) - gap + pad;
    if (x > 0 && x + wide > width + 0.5) { x = 0; y += tallest + between; tallest = 0; }
    boxes.push({ entity, x: x + margin, y, begins: x === 0, width: wide, height: tall, first, count, columns });
    x += wide + between;
    tallest = Math.max(tallest, tall);
    first += count;
  }
  return { boxes, cellWidth, cellHeight, gap, pad, head, margin, cells: first, height: Math.max(y + tallest, 24) };
}

function boxOf(placed, cell) {
  let low = 0, high = placed.boxes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (placed.boxes[middle].first <= cell) low = middle; else high = middle - 1;
  }
  return placed.boxes[low];
}

function cellAt(placed, box, k) {
  const step = placed.cellWidth + placed.gap, down = placed.cellHeight + placed.gap;
  return { x: box.x + placed.pad + (k % box.columns) * step, y: box.y + placed.head + Math.floor(k / box.columns) * down };
}

function positionOf(placed, cell) {
  const box = boxOf(placed, cell);
  return cellAt(placed, box, cell - box.first);
}

function hit(placed, x, y) {
  // The cell or the group's head at a point; a gap belongs to the cell before it.
  for (const box of placed.boxes) {
    if (x < box.x || x >= box.x + box.width || y < box.y || y >= box.y + box.height) continue;
    if (y < box.y + placed.head) return { box, cell: -1 };
    const column = Math.floor((x - box.x - placed.pad) / (placed.cellWidth + placed.gap));
    const row = Math.floor((y - box.y - placed.head) / (placed.cellHeight + placed.gap));
    const k = row * box.columns + column;
    if (column < 0 || column >= box.columns || row < 0 || k >= box.count) return null;
    return { box, cell: box.first + k };
  }
  return null;
}

function cellsIn(placed, frame) {
  // All cells that a rectangle touches.
  const found = [];
  for (const box of placed.boxes) {
    if (frame.right < box.x || frame.left > box.x + box.width || frame.bottom < box.y || frame.top > box.y + box.height) continue;
    for (let k = 0; k < box.count; k++) {
      const { x, y } = cellAt(placed, box, k);
      if (x + placed.cellWidth >= frame.left && x <= frame.right && y + placed.cellHeight >= frame.top && y <= frame.bottom) found.push(box.first + k);
    }
  }
  return found;
}

function neighbour(placed, cell, key) {
  // Within a group by rows and columns; beyond its edge the nearest cell in the arrow's direction.
  const box = boxOf(placed, cell), k = cell - box.first;
  const from = cellAt(placed, box, k);
  const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
  const column = (k % box.columns) + dx, other = k + dx + dy * box.columns;
  if (column >= 0 && column < box.columns && other >= 0 && other < box.count) return box.first + other;
  let best = cell, least = Infinity;
  for (const next of placed.boxes) {
    if (next === box) continue;
    const apart = Math.max(next.x - from.x, from.x - next.x - next.width, 0) + Math.max(next.y - from.y, from.y - next.y - next.height, 0);
    if (apart >= least) continue; // no cell of it is nearer
    for (let i = 0; i < next.count; i++) {
      const { x, y } = cellAt(placed, next, i);
      const along = (x - from.x) * dx + (y - from.y) * dy;
      const aside = Math.abs((x - from.x) * dy) + Math.abs((y - from.y) * dx);
      if (along > 0.5 && along + 2 * aside < least) { least = along + 2 * aside; best = next.first + i; }
    }
  }
  return best;
}
