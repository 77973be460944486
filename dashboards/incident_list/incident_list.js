// Names and summaries come from the fleet: they are set as text, never as markup.
const NUMBERS = { age: "Duration", jobs: "Jobs", nodes: "Nodes hit", members: "Members", confidence: "Confidence", owner: "Owner" };
const MEANING = { nodes: "Nodes that suffer: those of the cause and its members, and all nodes of a job that it slows down, stops or ends" };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function row(item, numbers, role) {
  const link = element("a", `row ${item.tone}`);
  link.href = item.href;
  link.target = "_self";
  const severity = element("span", "cell");
  severity.append(element("b", `badge ${item.tone}`, item.severity));
  const what = element("span", "cell what");
  const first = element("span", "summary", item.summary);
  first.title = item.summary;
  const second = element("span", "below", [item.cause, item.detector].filter(Boolean).join(" · "));
  if (item.jobs) second.prepend(element("span", "narrow", `${item.jobs} · `)); // first: a phone cuts the end
  if (item.simulated) second.prepend(element("b", "badge simulated", item.simulated));
  what.append(first, second);
  const state = element("span", `cell state ${item.state === "Open" ? "open" : ""}`, item.state);
  link.append(severity, what, ...numbers.map((f) => element("span", "cell num", item[f])), state);
  for (const [i, cell] of link.querySelectorAll(".num").entries())
    cell.title = [cell.textContent, MEANING[numbers[i]]].filter(Boolean).join(". "); // a long name is cut
  if (role) {
    link.setAttribute("role", "row");
    for (const cell of link.children) cell.setAttribute("role", "cell");
  }
  return link;
}

function head(numbers, role) {
  const made = element("div", "row head");
  if (role) made.setAttribute("role", "row");
  else made.setAttribute("aria-hidden", "true");
  for (const field of ["Severity", "Incident", ...numbers, "State"]) {
    const cell = element("span", "cell", NUMBERS[field] ?? field);
    if (MEANING[field]) cell.title = MEANING[field];
    if (role) cell.setAttribute("role", "columnheader");
    made.append(cell);
  }
  return made;
}

function box(label, checked, change) {
  const made = element("input", "box");
  made.type = "checkbox";
  made.checked = checked;
  made.setAttribute("aria-label", label);
  made.onchange = () => change(made.checked);
  return made;
}

// Lines with a box in front; `list.fleetpulseSelected` lives as long as the element, so that a refresh keeps it.
function selectableLines(list, items, numbers, report) {
  const chosen = (list.fleetpulseSelected = list.fleetpulseSelected || new Set());
  for (const id of [...chosen]) if (!items.some((item) => item.id === id)) chosen.delete(id);
  const boxes = new Map();
  const tell = () => {
    all.checked = chosen.size > 0 && chosen.size === items.length;
    all.indeterminate = chosen.size > 0 && chosen.size < items.length;
    report([...chosen]);
  };
  const all = box("Select all incidents of this page", false, (on) => {
    chosen.clear();
    for (const item of items) {
      if (on) chosen.add(item.id);
      boxes.get(item.id).checked = on;
    }
    tell();
  });
  all.checked = chosen.size > 0 && chosen.size === items.length;
  all.indeterminate = chosen.size > 0 && chosen.size < items.length;
  const first = element("div", "line");
  first.append(all, head(numbers, false));
  const lines = [first];
  let group = null;
  for (const item of items) {
    if (item.group && item.group !== group) lines.push(element("div", "group", (group = item.group)));
    const line = element("div", "line");
    const own = box(`Select ${item.id}`, chosen.has(item.id), (on) => {
      if (on) chosen.add(item.id);
      else chosen.delete(item.id);
      tell();
    });
    boxes.set(item.id, own);
    line.append(own, row(item, numbers, false));
    lines.push(line);
  }
  return lines;
}

function startKeys(parent, list, data, component) {
  const legend = parent.querySelector(".keys");
  const drawn = keyLegend(data.may_write, data.items.length);
  if (legend) legend.replaceWith(drawn);
  else list.before(drawn);
  return listenForKeys(list, data.items, {
    open: (i) => list.querySelectorAll("a.row")[i].click(),
    mine: () => component.setTriggerValue("mine", true),
    acknowledge: (item) => {
      if (!data.may_write || !item.waits) return;
      item.waits = false; // sent once; the next data says whether it still waits
      component.setTriggerValue("acknowledge", item.id);
    },
  });
}

export default function (component) {
  const { parentElement, data, setStateValue } = component;
  const list = parentElement.querySelector(".list");
  const active = parentElement.activeElement;
  const focused = active && (active.href || active.getAttribute("aria-label"));
  const { items, selectable } = data;
  const numbers = Object.keys(NUMBERS).filter((f) => items.some((item) => item[f])); // no empty columns
  list.style.setProperty("--numbers", numbers.length);
  list.setAttribute("role", selectable ? "group" : "table");
  list.setAttribute("aria-label", "Incidents");
  list.classList.toggle("selectable", selectable);
  const lines = selectable
    ? selectableLines(list, items, numbers, (ids) => setStateValue("selected", ids))
    : [head(numbers, true), ...items.map((item) => row(item, numbers, true))];
  list.replaceChildren(...lines);
  list.hidden = selectable && !items.length; // the keys stay: M shows all again
  if (list.fleetpulseStop) list.fleetpulseStop(); // a rerun calls this again without the clean-up of the previous call
  list.fleetpulseStop = () => {};
  if (selectable) list.fleetpulseStop = startKeys(parentElement, list, data, component);
  // a refresh replaces the rows; the keyboard focus stays, or goes to the row that takes the place of a marked one
  const kept = [...list.querySelectorAll("a, input")].find((p) => (p.href || p.getAttribute("aria-label")) === focused);
  if (kept) kept.focus();
  keepMark(list, items, focused && !kept);
  return () => list.fleetpulseStop();
}
