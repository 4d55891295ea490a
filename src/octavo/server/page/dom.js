// Elements from plain data. Text goes in as text nodes only, so nothing a model or server writes can become markup.

export const $ = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Keep the end in sight, unless the reader has scrolled up.
export function follow(container, change) {
  const atEnd = container.scrollHeight - container.scrollTop - container.clientHeight < 48;
  change();
  if (atEnd) container.scrollTop = container.scrollHeight;
}
