// Opens a page as a click on a link does: the frame opens it within the session, and the browser keeps one step for it.
// within: an element of the document. A session that the frame does not reach yet loads the page.
function openAddress(within, address) {
  const link = document.createElement("a");
  link.href = address;
  link.target = "_self";
  link.hidden = true;
  within.append(link);
  link.click();
  link.remove();
}
