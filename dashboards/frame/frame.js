// Search, links within the session, and the time zone. All names come from the fleet: they are set as text.
const WAIT_MS = 140; // chosen: a pause between keys
const NAVIGATION = "[data-testid=stTopNav] a, [data-testid=stTopNavPopover] a, [data-testid=stSidebarNav] a";
const LINK_EVENTS = ["click", "auxclick", "contextmenu"]; // what opens a link, also in a new tab
const GIVE_UP_MS = 5000; // chosen: a session that does not answer; a busy server may take a second or two, and a load of the page costs it more

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Returns whether a click opens a link in its own tab.
function isPlain(event) {
  return !event.metaKey && !event.ctrlKey && !event.shiftKey && event.button === 0;
}

function isTyping(event) {
  const at = event.composedPath()[0];
  return at instanceof HTMLElement && (at.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(at.tagName));
}

function drawHits(parts, data, chosen) {
  const { list, input } = parts;
  const text = input.value.trim();
  const current = text === data.query && text.length > 1;
  const rows = current ? data.hits : [];
  const links = rows.map((hit, i) => {
    const link = element("a", i === chosen ? "hit on" : "hit");
    link.href = hit.href;
    link.target = "_self";
    link.id = `fp-hit-${i}`;
    link.setAttribute("role", "option");
    link.setAttribute("aria-selected", i === chosen);
    link.append(element("b", "", hit.name), element("i", "", hit.kind), element("span", "", hit.below));
    return link;
  });
  let note = "";
  if (text.length < 2) note = "Search nodes, racks, jobs, serial numbers and incidents: at least 2 characters.";
  else if (!current) note = "Searching…";
  else if (data.error) note = data.error;
  else if (!rows.length) note = `Nothing found for "${text}".`;
  else if (data.total > rows.length) note = `${rows.length} of ${data.total}; type more to see others.`;
  if (note) links.push(element("div", "note", note));
  list.replaceChildren(...links);
  if (links[chosen] && links[chosen].scrollIntoView) links[chosen].scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-expanded", !list.hidden);
  if (rows.length) input.setAttribute("aria-activedescendant", `fp-hit-${chosen}`);
  else input.removeAttribute("aria-activedescendant");
}

// Returns whether a link leads to a page of this dashboard.
function leadsToPage(link, pages) {
  if (!link.href || (link.target && link.target !== "_self") || link.hasAttribute("download")) return false;
  const to = new URL(link.href, location.href);
  const base = location.pathname.replace(/[^/]*$/, "");
  if (to.origin !== location.origin || !to.pathname.startsWith(base)) return false;
  return pages.includes(to.pathname.slice(base.length) || pages[0]);
}

// Returns whether a link leads to a part of the page that is shown: the browser itself scrolls there, without a run.
function leadsToPart(link) {
  const to = new URL(link.href, location.href);
  return Boolean(to.hash) && to.origin + to.pathname + to.search === location.origin + location.pathname + location.search;
}

// Opens a page within the session, as one step of the browser's history: Streamlit reads the address when the browser
// goes to another step. The browser loads the page unless the frame of a new run comes.
function openWithin(root, address) {
  clearTimeout(root.fleetpulseGiveUp);
  root.fleetpulseGiveUp = setTimeout(() => location.reload(), GIVE_UP_MS);
  history.pushState({}, "", address);
  window.dispatchEvent(new PopStateEvent("popstate", { state: {} }));
}

// Gives a link of Streamlit's navigation, which leads to a page without parameters, those that every page keeps.
function keepParameters(link, names) {
  const asked = new URLSearchParams(location.search);
  link.search = new URLSearchParams(names.filter((name) => asked.has(name)).map((name) => [name, asked.get(name)]));
}

// A menu of pages stays open after a choice (on a phone it covers the page): it is closed by its own button, once
// Streamlit has handled the click.
function closeMenu(event) {
  const path = event.composedPath();
  if (path.some((part) => part instanceof HTMLElement && part.dataset.testid === "stTopNavPopover")) {
    setTimeout(() => document.querySelector("[data-testid=stTopNavSection][aria-expanded=true]")?.click());
  }
  const menu = path.find((part) => part instanceof HTMLElement && part.dataset.testid === "stSidebar");
  if (!menu || !path.some((part) => part instanceof HTMLAnchorElement)) return;
  setTimeout(() => {
    if (menu.dataset.collapsed === "false") menu.querySelector("[data-testid=stSidebarCollapseButton] button")?.click();
  });
}

// Gives the whole document the colour scheme of Streamlit's theme, which Streamlit gives to its app alone: popovers,
// menus and dialogs are drawn beside the app. Returns what ends it.
function followScheme() {
  const app = document.querySelector("[data-testid=stApp]");
  if (!app) return () => {};
  const copy = () => { document.documentElement.style.colorScheme = getComputedStyle(app).colorScheme; };
  const observer = new MutationObserver(copy); // a theme is a class of the app
  observer.observe(app, { attributes: true, attributeFilter: ["class", "style"] });
  copy();
  return () => observer.disconnect();
}

export default function (component) {
  const { parentElement, data, setStateValue, setTriggerValue } = component;
  const root = parentElement.querySelector(".frame");
  const parts = { list: root.querySelector(".hits"), input: root.querySelector(".q") };
  const { list, input } = parts;
  const zone = root.querySelector(".zone");
  if (root.fleetpulseStop) root.fleetpulseStop(); // a rerun calls this again without the clean-up of the previous call
  root.fleetpulseChosen = 0;
  if (root.fleetpulseRun !== data.run) clearTimeout(root.fleetpulseGiveUp);
  root.fleetpulseRun = data.run;
  let timer = 0;

  zone.textContent = data.local ? "Local" : "UTC"; // as wide as UTC: the pages beside it have no more room
  zone.title = data.local ? `Times are in ${data.zone || "local time"}. Show UTC.` : `Show local time ${data.zone}`.trim();
  zone.setAttribute("aria-label", zone.title);
  zone.onclick = () => setTriggerValue("zone", true);

  const close = () => { list.hidden = true; drawHits(parts, data, 0); };
  const ask = () => setStateValue("query", input.value.trim());
  input.oninput = () => {
    list.hidden = false;
    root.fleetpulseChosen = 0;
    drawHits(parts, data, 0);
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  };
  input.onfocus = () => { list.hidden = false; drawHits(parts, data, root.fleetpulseChosen); };
  input.onkeydown = (event) => {
    const links = [...list.querySelectorAll("a")];
    if (event.key === "Escape") { input.blur(); close(); }
    else if (event.key === "Enter") { const link = links[root.fleetpulseChosen]; if (link) link.click(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const step = event.key === "ArrowDown" ? 1 : -1;
      root.fleetpulseChosen = Math.max(0, Math.min(links.length - 1, root.fleetpulseChosen + step));
      drawHits(parts, data, root.fleetpulseChosen);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const onKey = (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
    event.preventDefault();
    input.focus();
    input.select();
  };
  const onClick = (event) => {
    if (!event.composedPath().includes(root)) list.hidden = true;
    closeMenu(event);
    if (event.defaultPrevented || !isPlain(event)) return;
    const link = event.composedPath().find((part) => part instanceof HTMLAnchorElement);
    if (!link || !leadsToPage(link, data.pages) || leadsToPart(link)) return;
    event.preventDefault();
    list.hidden = true;
    input.blur();
    if (link.href !== location.href) openWithin(root, link.href);
  };
  // Before Streamlit sees it, whose step to a page has no parameters and is within the tab, also with Ctrl.
  const onNavigation = (event) => {
    const link = event.target.closest?.(NAVIGATION);
    if (!link || !leadsToPage(link, data.pages)) return;
    keepParameters(link, data.kept);
    if (event.type !== "click") return;
    event.stopPropagation();
    onClick(event);
  };
  const stopFollowing = followScheme();
  if (!root.fleetpulseWaits) { // kept over reruns: the wait for one must not end with it
    document.fleetpulseStopWaits?.(); // of the frame before this one
    document.fleetpulseStopWaits = followWaits();
    root.fleetpulseWaits = true;
  }
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  for (const type of LINK_EVENTS) document.addEventListener(type, onNavigation, { capture: true });
  drawHits(parts, data, 0);
  const next = data.next && new URL(data.next, location.href).href;
  if (next && root.fleetpulseNext !== next && next !== location.href) openWithin(root, next);
  root.fleetpulseNext = next;
  root.fleetpulseStop = () => {
    clearTimeout(timer);
    stopFollowing();
    document.removeEventListener("keydown", onKey);
    document.removeEventListener("click", onClick);
    for (const type of LINK_EVENTS) document.removeEventListener(type, onNavigation, { capture: true });
  };
  return root.fleetpulseStop;
}
