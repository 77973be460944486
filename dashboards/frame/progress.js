// Shows that the server still works on what a person did on the page, from a second after the click on.
const SLOW_MS = 900; // chosen: a wait of more than a second shows that it is one
const NO_RUN_MS = 600; // chosen: a click without a run by then asked for nothing
const POLL_MS = 200;
const OWN = "[data-testid=stMain], [data-testid=stPopoverBody], [role=dialog]"; // not the header, whose search says so itself

// Returns the label of the button that an event is for, empty for anything else.
function labelOf(event) {
  const button = event.composedPath().find((part) => part instanceof HTMLButtonElement);
  return event.type === "click" && button?.querySelector("p")?.textContent.trim() || "";
}

// Begins to follow clicks and keys. Returns what ends it.
function followWaits() {
  const app = document.querySelector("[data-testid=stApp]");
  if (!app) return () => {};
  document.querySelector(".fp-wait")?.remove();
  const line = document.createElement("div");
  const [what, seconds] = ["span", "span"].map((tag) => line.appendChild(document.createElement(tag)));
  line.className = "fp-wait";
  line.setAttribute("role", "status");
  seconds.setAttribute("aria-hidden", "true"); // else it is read aloud every second
  line.hidden = true;
  document.body.append(line);
  let timer = 0;
  const stop = () => { clearInterval(timer); line.hidden = true; what.textContent = ""; };
  const begin = (event) => {
    const path = event.composedPath();
    if (event.type === "click" && !path.some((part) => part instanceof HTMLElement && part.matches(OWN))) return;
    if (event.type === "keydown" && event.key.length > 1 && event.key !== "Enter") return;
    if (!line.hidden && app.dataset.testScriptState !== "notRunning") return; // the wait that is shown is not over
    stop();
    const since = performance.now(), label = labelOf(event);
    let [ran, quiet] = [false, 0];
    timer = setInterval(() => {
      const waited = performance.now() - since;
      const running = app.dataset.testScriptState !== "notRunning";
      ran ||= running;
      quiet = running ? 0 : quiet + 1;
      if (quiet > 1 && (ran || waited > NO_RUN_MS)) { stop(); return; }
      if (!running || waited < SLOW_MS) return;
      const text = label ? `${label}: waiting for the API` : "Waiting for the API";
      if (what.textContent !== text) what.textContent = text;
      seconds.textContent = `, ${Math.max(1, Math.floor(waited / 1000))} s`;
      line.hidden = false;
    }, POLL_MS);
  };
  for (const type of ["click", "keydown"]) document.addEventListener(type, begin, { capture: true });
  return () => {
    stop();
    line.remove();
    for (const type of ["click", "keydown"]) document.removeEventListener(type, begin, { capture: true });
  };
}
