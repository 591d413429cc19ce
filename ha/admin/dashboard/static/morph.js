// Makes one tree of elements equal to another and changes only what differs: focus, selection and scroll positions stay.
// Elements with an id are matched by it, others by their position. Elements with data-keep are not changed.

export function morph(kept, wanted) {
  if (kept.hasAttribute("data-keep")) return;
  copyAttributes(kept, wanted);
  let next = kept.firstChild;
  for (const node of wanted.childNodes) {
    const match = node.id ? byId(kept, node.id) : isAlike(next, node) ? next : null;
    if (match === null) {
      kept.insertBefore(node.cloneNode(true), next);
      continue;
    }
    next = removeUpTo(next, match).nextSibling;
    if (node.nodeType === Node.ELEMENT_NODE) morph(match, node);
    else if (match.data !== node.data) match.data = node.data;
  }
  removeUpTo(next, null);
}

function byId(parent, id) {
  return [...parent.children].find((child) => child.id === id) ?? null;
}

function isAlike(one, other) {
  return one !== null && one.nodeType === other.nodeType && one.nodeName === other.nodeName && !one.id;
}

function removeUpTo(node, end) {
  while (node !== end) {
    const next = node.nextSibling;
    node.remove();
    node = next;
  }
  return end;
}

function copyAttributes(kept, wanted) {
  for (const { name } of [...kept.attributes]) {
    if (!wanted.hasAttribute(name)) kept.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (kept.getAttribute(name) !== value) kept.setAttribute(name, value);
  }
}
