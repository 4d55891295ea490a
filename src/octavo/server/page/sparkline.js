// A curve without axes: the right edge is now, the bottom is zero.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 48;

export function sparkline() {
  const node = document.createElementNS(NS, "svg");
  node.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  node.setAttribute("preserveAspectRatio", "none");
  node.setAttribute("class", "spark");
  node.setAttribute("aria-hidden", "true");
  const [area, line] = ["area", "line"].map((name) => {
    const path = document.createElementNS(NS, "path");
    path.setAttribute("class", name);
    node.append(path);
    return path;
  });
  return {
    node,
    // points: [seconds before now (negative), value]; most: the value at the top, else the largest there is.
    draw(points, seconds, most) {
      const top = most ?? Math.max(1e-9, ...points.map(([, value]) => value)) * 1.1;
      const places = points.map(([at, value]) => {
        const x = WIDTH * (1 + at / seconds);
        const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / top);
        return `${x.toFixed(1)},${y.toFixed(1)}`;
      });
      if (!places.length) return;
      line.setAttribute("d", `M${places.join("L")}`);
      area.setAttribute("d", `M${places[0].split(",")[0]},${HEIGHT}L${places.join("L")}L${WIDTH},${HEIGHT}Z`);
    },
  };
}
