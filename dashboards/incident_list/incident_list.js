// Names and summaries come from the fleet: they are set as text, never as markup.
const NUMBERS = { age: "Duration", members: "Members", confidence: "Confidence" };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function row(item, numbers, open) {
  const link = element("a", `row ${item.tone}`);
  link.href = `incident?id=${encodeURIComponent(item.id)}`;
  link.target = "_self";
  link.setAttribute("role", "row");
  const severity = element("span", "cell");
  severity.append(element("b", `badge ${item.tone}`, item.severity));
  const what = element("span", "cell what");
  const first = element("span", "summary", item.summary);
  first.title = item.summary;
  const second = element("span", "below", [item.cause, item.detector].filter(Boolean).join(" · "));
  if (item.simulated) second.prepend(element("b", "badge simulated", item.simulated));
  what.append(first, second);
  const state = element("span", `cell state ${item.state === "Open" ? "open" : ""}`, item.state);
  link.append(severity, what, ...numbers.map((f) => element("span", "cell num", item[f])), state);
  for (const cell of link.children) cell.setAttribute("role", "cell");
  link.onclick = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    open(item.id);
  };
  return link;
}

export default function (component) {
  const { parentElement, data, setTriggerValue } = component;
  const list = parentElement.querySelector(".list");
  const focused = parentElement.activeElement && parentElement.activeElement.href;
  list.setAttribute("role", "table");
  list.setAttribute("aria-label", "Incidents");
  const numbers = Object.keys(NUMBERS).filter((f) => data.some((item) => item[f])); // no empty columns
  list.style.setProperty("--numbers", numbers.length);
  const head = element("div", "row head");
  head.setAttribute("role", "row");
  for (const name of ["Severity", "Incident", ...numbers.map((f) => NUMBERS[f]), "State"]) {
    const cell = element("span", "cell", name);
    cell.setAttribute("role", "columnheader");
    head.append(cell);
  }
  list.replaceChildren(head, ...data.map((item) => row(item, numbers, (id) => setTriggerValue("picked", id))));
  // a refresh replaces the rows; the keyboard focus stays
  if (focused) for (const link of list.querySelectorAll("a")) if (link.href === focused) link.focus();
}
