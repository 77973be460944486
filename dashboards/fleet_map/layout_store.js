// Names and groups of the cells, for the map. The message that brings them is the same at every refresh, so that
// Streamlit sends only its hash again.
const KEPT = 4;

export default function ({ data }) {
  const layouts = (globalThis.fleetpulseLayouts ??= new Map());
  data = JSON.parse(new TextDecoder().decode(data));
  if (layouts.has(data.layout)) return;
  layouts.set(data.layout, { groups: data.groups, names: data.names });
  while (layouts.size > KEPT) layouts.delete(layouts.keys().next().value);
  window.dispatchEvent(new Event("fleetpulse-layout"));
}
