// Keys of the list. They only move, open, filter and acknowledge: nothing that cannot be undone has a key.
const OVER = "[role=dialog], [data-testid=stDialog], [data-testid=stPopoverBody]"; // what lies over the page

const SETTLE_MS = 1000; // chosen: a person sees within it that the mark is on another row

// Returns whether a key belongs to a field, or to something that lies over the page.
function keyIsTaken(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return true;
  if (event.repeat && !"jk".includes(event.key)) return true; // a key held down acts once
  const at = event.composedPath()[0];
  const typed = at instanceof HTMLElement && (at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName));
  if (typed && at.type !== "checkbox") return true;
  return [...document.querySelectorAll(OVER)].some((part) => part.getClientRects().length > 0);
}

// Returns the number of the row that a key leads to, -1 for none. marked: the number of the marked row, -1 for none.
function nextRow(key, marked, items) {
  if (key === "j") return Math.min(marked + 1, items.length - 1);
  if (key === "k") return Math.max(marked - 1, 0);
  for (let step = 1; step <= items.length; step++) {
    const i = (marked + step + items.length) % items.length;
    if (items[i].tone === "critical" && items[i].waits) return i;
  }
  return -1;
}

// `list.fleetpulseMarked` is {id, at, since} and lives as long as the element: a row that is gone gives its place to the
// next. since: when the mark moved by itself, 0 if a person moved it.
function markRow(list, items, i, since, focus) {
  list.fleetpulseMarked = items[i] ? { id: items[i].id, at: i, since } : null;
  [...list.querySelectorAll("a.row")].forEach((link, at) => {
    link.classList.toggle("marked", at === i);
    if (at === i && focus) link.focus();
  });
}

function markedRow(list, items) {
  const known = list.fleetpulseMarked;
  if (!known) return -1;
  const i = items.findIndex((item) => item.id === known.id);
  return i >= 0 ? i : Math.min(known.at, items.length - 1);
}

// Marks the rows of a refresh again; a key that was meant for a row that is gone does not act on the next one.
function keepMark(list, items, focus) {
  const known = list.fleetpulseMarked;
  const i = markedRow(list, items);
  if (i < 0) return; // no rows now: the place is kept
  markRow(list, items, i, items[i].id === known.id ? known.since : performance.now(), focus);
}

function isSettled(list) {
  const { since } = list.fleetpulseMarked;
  return !since || performance.now() - since > SETTLE_MS;
}

// Listens until the returned function is called.
function listenForKeys(list, items, acts) {
  const onKey = (event) => {
    const key = event.key.toLowerCase();
    if (!list.isConnected || keyIsTaken(event)) return;
    const marked = markedRow(list, items);
    if (["j", "k", "n"].includes(key)) {
      const i = nextRow(key, marked, items);
      if (i >= 0) markRow(list, items, i, 0, true);
    } else if (key === "m") acts.mine();
    else if (marked < 0 || !items[marked]) return;
    else if (key === "o") acts.open(marked);
    else if (key === "a") isSettled(list) && acts.acknowledge(items[marked]);
    else return;
    event.preventDefault();
  };
  document.addEventListener("keydown", onKey);
  return () => document.removeEventListener("keydown", onKey);
}

function keyLegend(mayWrite, rows) {
  const made = element("p", "keys");
  const keys = rows ? [["J", ""], ["K", "move"], ["N", "next critical"], ["O", "open"]] : [];
  if (rows && mayWrite) keys.push(["A", "acknowledge"]);
  keys.push(["M", rows ? "mine" : "mine, or all"]);
  for (const [key, text] of keys) made.append(element("kbd", "", key), ` ${text} `);
  return made;
}
