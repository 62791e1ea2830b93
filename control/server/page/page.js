// Draws what control says through one stream of events: everything first, then entries that have changed. Whatever is drawn is text, never
// markup: names are other people's.

const SVG = 'http://www.w3.org/2000/svg';
const PAGE_ROWS = 40;
// Where there are more lines, idle ones are drawn for what is selected alone.
const MOST_IDLE = 200;
const SECTIONS = ['control', 'hosts', 'switches', 'links', 'tenants', 'plans', 'decisions', 'withdrawals', 'communicators', 'operations', 'ended',
  'waiting', 'measured', 'stragglers', 'findings'];

const facts = Object.fromEntries(SECTIONS.map((name) => [name, new Map()]));
const dirty = new Set();
const view = { selected: null, filter: '', rows: PAGE_ROWS, focus: null, number: 0 };
const byId = (id) => document.getElementById(id);

// Elements

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows by key: those that stay are the same elements, so that focus stays where it is.
function keyed(parent, entries, make, update) {
  const known = parent.rowsByKey ?? (parent.rowsByKey = new Map());
  const wanted = new Set(entries.map(([key]) => key));
  for (const [key, row] of known) {
    if (!wanted.has(key)) { row.remove(); known.delete(key); }
  }
  let at = parent.firstElementChild;
  for (const [key, entry] of entries) {
    let row = known.get(key);
    if (!row) { row = make(key, entry); known.set(key, row); }
    update(row, entry, key);
    if (row === at) at = at.nextElementSibling;
    else parent.insertBefore(row, at);
  }
}

// A table: columns are [title, what a row shows, whether it is a quantity]. A cell is text, or {text, tone, act}.
function table(parent, caption, columns, entries, empty) {
  let body = parent.querySelector('tbody');
  if (!body) {
    body = element('tbody');
    const titles = columns.map(([title, , number]) => element('th', { scope: 'col', class: number ? 'number' : null }, title));
    parent.replaceChildren(
      element('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
        element('table', { 'aria-label': caption }, element('thead', {}, element('tr', {}, ...titles)), body)),
      element('p', { class: 'hint' }));
  }
  setText(parent.lastElementChild, entries.length ? '' : empty);
  parent.firstElementChild.hidden = !entries.length;
  const make = () => element('tr', {}, ...columns.map(([, , number]) => element('td', { class: number ? 'number' : null })));
  keyed(body, entries, make, (row, entry, key) => columns.forEach(([, show, number], index) => {
    const shown = show(entry, key), cell = row.children[index];
    const { text, tone, act } = typeof shown === 'object' ? shown : { text: String(shown) };
    cell.className = [number && 'number', tone].filter(Boolean).join(' ');
    if (!act) { setText(cell, text); return; }
    let button = cell.querySelector('button');
    if (!button) {
      button = element('button', { type: 'button', onclick: () => button.act() });
      cell.replaceChildren(button);
    }
    button.act = act;
    setText(button, text);
  }));
}

// Quantities

const count = (number) => (number ?? 0).toLocaleString('en');
const milliseconds = (ns) => ns / 1e6;

function scaled(value, units, step) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(2)} ${units[unit]}`;
}

const rate = (bps) => bps ? scaled(bps, ['bit/s', 'kbit/s', 'Mbit/s', 'Gbit/s', 'Tbit/s'], 1000) : '-';
const duration = (ns) => ns ? scaled(ns, ['ns', 'µs', 'ms', 's'], 1000) : '-';
const share = (part) => `${Math.round(part * 100)} %`;
const clock = (ns) => ns ? new Date(milliseconds(ns)).toLocaleTimeString('en', { hour12: false }) : '-';
const words = (name) => name.replaceAll('_', ' ');

// A message's fields in words: "weight 2, priority high".
function describe(value) {
  if (Array.isArray(value)) return value.map(describe).join('; ');
  if (value === null || typeof value !== 'object') return String(value);
  return Object.entries(value).map(([name, field]) => {
    if (field === true) return words(name);
    if (name.endsWith('_ns')) return `${words(name.slice(0, -3))} ${field > 1e17 ? clock(field) : duration(field)}`;
    if (name.endsWith('_bps')) return `${words(name.slice(0, -4))} ${rate(field)}`;
    return `${words(name)} ${typeof field === 'object' ? `(${describe(field)})` : field}`;
  }).join(', ');
}

// What control says, laid together

const directed = (from, to) => `${from}:${to}`;
const values = (name) => [...facts[name].values()];
const inOrder = (name) => values(name).sort((a, b) => (a.place ?? 0) - (b.place ?? 0));

// What plans send over each directed link: each ring edge carries the plan's share, divided among its connections.
function plannedLoads() {
  const loads = new Map();
  for (const plan of facts.plans.values()) {
    for (const edge of plan.ring_edges ?? []) {
      const paths = edge.paths ?? [];
      for (const path of paths) hops(edge, path).forEach((link) =>
        loads.set(link, (loads.get(link) ?? 0) + (plan.share_bps ?? 0) / paths.length));
    }
  }
  return loads;
}

// Directed links of a path; none where it is not known.
function hops(edge, path) {
  if (!path.switches) return [];
  const nodes = [edge.from, ...path.switches, edge.to];
  return nodes.slice(1).map((to, index) => directed(nodes[index], to));
}

const level = (load) => load >= 0.8 ? 3 : load >= 0.3 ? 2 : 1;
const RANK = ['', 'own1', 'withdrawn', 'own2', 'own3', 'cross1', 'cross2', 'cross3', 'failed'];
const worse = (a, b) => RANK.indexOf(a) >= RANK.indexOf(b) ? a : b;

// The class of a directed link: its state, else its load by whose traffic it is.
function classOf(link, planned) {
  if (link.state === 'failed' || link.state === 'withdrawn') return link.state;
  const cross = link.cross_traffic_bps ?? 0, load = (cross + planned) / (link.capacity_bps || 1);
  if (link.state === 'congested') return `cross${level(load)}`;
  return planned > 0 ? `own${level(load)}` : '';
}

// A host's class by what its agent measures.
function hostClass(host) {
  if (!host.connected) return 'away';
  if (host.withdrawn) return 'withdrawn';
  let worst = '';
  for (const link of facts.measured.get(host.name) ?? []) {
    const load = Math.max(link.egress_bps ?? 0, link.ingress_bps ?? 0) / (link.capacity_bps || Infinity);
    const congestion = link.congestion ?? {}, congested = (congestion.level ?? 'none') !== 'none' && congestion.level !== 'unknown';
    const cross = congested && congestion.cause === 'cross_traffic';
    if (cross || load > 0) worst = worse(`${cross ? 'cross' : 'own'}${level(load)}`, worst);
  }
  return worst;
}

// Racks with their hosts and switches, and the other switches; `group` has the rack of each that is in one.
function layout() {
  const attached = new Map();
  for (const link of facts.links.values()) {
    if (facts.hosts.has(link.from) && facts.switches.has(link.to) && !attached.has(link.from)) attached.set(link.from, link.to);
  }
  const racks = new Map(), group = new Map();
  for (const host of inOrder('hosts')) {
    const leaf = attached.get(host.name), name = host.rack ?? leaf ?? 'no rack';
    const rack = racks.get(name) ?? racks.set(name, { name, hosts: [], switches: new Set() }).get(name);
    rack.hosts.push(host);
    group.set(host.name, `rack ${name}`);
    if (leaf && !group.has(leaf)) { rack.switches.add(leaf); group.set(leaf, `rack ${name}`); }
  }
  const upper = inOrder('switches').filter((one) => !group.has(one.name));
  upper.forEach((one) => group.set(one.name, `switch ${one.name}`));
  return { racks: [...racks.values()], upper, group };
}

// The fabric's picture

const WIDTH = 1200;

function drawFabric() {
  const svg = byId('picture'), { racks, upper, group } = layout(), planned = plannedLoads();
  const tiers = ['core', 'spine', 'leaf'].map((kind) => upper.filter((one) => one.kind === kind)).filter((tier) => tier.length);
  const places = new Map(), step = WIDTH / Math.max(racks.length, 1);
  const columns = Math.max(1, Math.min(4, Math.floor((step - 4) / 8)));
  const cell = Math.min(12, (step - 4) / columns), inset = (step - columns * cell) / 2;
  const tallest = Math.max(1, ...racks.map((rack) => Math.ceil(rack.hosts.length / columns)));
  tiers.forEach((tier, row) => tier.forEach((one, index) =>
    places.set(`switch ${one.name}`, { x: WIDTH * (index + 0.5) / tier.length, y: 24 + row * 90, width: Math.min(90, WIDTH / tier.length - 6) })));
  const top = 24 + Math.max(tiers.length, 0.3) * 90 + 40;
  racks.forEach((rack, index) => places.set(`rack ${rack.name}`, { x: step * (index + 0.5), y: top, width: Math.min(step, Math.max(80, columns * cell + 12)) }));
  svg.setAttribute('viewBox', `0 0 ${WIDTH} ${Math.ceil(top + tallest * cell + 34)}`);
  if (!svg.firstElementChild) svg.append(drawing('g'), drawing('g'));
  const [lines, nodes] = svg.children, route = selectedRoute();

  const bundles = new Map();
  for (const link of facts.links.values()) {
    const [a, b] = [group.get(link.from), group.get(link.to)].sort();
    if (!a || !b || a === b) continue;
    const key = `${a} ${b}`, known = bundles.get(key) ?? bundles.set(key, { a, b, of: '', route: false }).get(key);
    const name = directed(link.from, link.to);
    known.of = worse(classOf(link, planned.get(name) ?? 0), known.of);
    known.route ||= route.has(name);
  }
  const shown = ([, { a, b, of, route }]) => of || route || bundles.size <= MOST_IDLE || [a, b].includes(view.selected?.key);
  const ordered = [...bundles].filter(shown).sort(([, a], [, b]) => RANK.indexOf(a.of) - RANK.indexOf(b.of) || a.route - b.route);
  keyed(lines, ordered, () => drawing('path'), (path, { a, b, of, route }) => {
    const [high, low] = [places.get(a), places.get(b)].sort((one, other) => one.y - other.y);
    path.setAttribute('class', `link ${of}${route ? ' route' : ''}`);
    path.setAttribute('d', `M${high.x} ${high.y + 9}L${low.x} ${low.y - (low.y === top ? 4 : 9)}`);
  });

  const all = [...tiers.flat().map((one) => [`switch ${one.name}`, { one }]), ...racks.map((rack) => [`rack ${rack.name}`, { rack }])];
  if (!places.has(view.focus)) view.focus = all[0]?.[0] ?? null;
  keyed(nodes, all, node, (shape, { one, rack }, key) => {
    const { x, y, width } = places.get(key);
    shape.setAttribute('class', view.selected?.key === key ? 'selected' : '');
    shape.setAttribute('tabindex', view.focus === key ? 0 : -1);
    shape.setAttribute('transform', `translate(${x} ${y})`);
    const [frame, text, hosts] = shape.children;
    frame.setAttribute('x', -width / 2 + 1);
    frame.setAttribute('width', Math.max(2, width - 2));
    if (one) {
      setText(text, width > 30 ? short(one.name, width / 7) : '');
      shape.setAttribute('aria-label', `${one.kind} ${one.name}${one.withdrawn ? ', drained' : ''}, ${count(one.connections)} connections`);
      return;
    }
    frame.setAttribute('y', -4);
    frame.setAttribute('height', Math.ceil(rack.hosts.length / columns) * cell + 8);
    text.setAttribute('y', tallest * cell + 20);
    setText(text, step > 34 ? short(rack.name, step / 7) : '');
    const away = rack.hosts.filter((host) => !host.connected).length;
    shape.setAttribute('aria-label', `rack ${rack.name}: ${rack.hosts.length} hosts, ${away} without an agent`);
    keyed(hosts, rack.hosts.map((host) => [host.name, host]), () => drawing('rect', { width: cell - 1.5, height: cell - 1.5 }), (box, host) => {
      const at = rack.hosts.indexOf(host);
      box.setAttribute('class', `host ${hostClass(host)}${route.has(host.name) ? ' route' : ''}`);
      box.setAttribute('x', inset - step / 2 + (at % columns) * cell);
      box.setAttribute('y', Math.floor(at / columns) * cell);
      box.setAttribute('width', cell - 1.5);
      box.setAttribute('height', cell - 1.5);
    });
  });
}

const short = (name, most) => name.length > most ? `${name.slice(0, Math.max(1, most - 1))}…` : name;

function node(key) {
  const shape = drawing('g', { role: 'button' },
    drawing('rect', { class: 'frame', y: -9, height: 18, rx: 3 }),
    drawing('text', { 'text-anchor': 'middle', y: 4 }),
    drawing('g'));
  const select = () => { view.focus = key; choose({ key }); };
  shape.addEventListener('click', select);
  shape.addEventListener('keydown', (event) => {
    const all = [...shape.parentNode.children], at = all.indexOf(shape);
    const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
    if (event.key === 'Enter' || event.key === ' ') select();
    else if (event.key in moves) {
      const next = all[moves[event.key]];
      if (!next) return;
      shape.setAttribute('tabindex', -1);
      next.setAttribute('tabindex', 0);
      view.focus = [...shape.parentNode.rowsByKey].find(([, row]) => row === next)?.[0] ?? null;
      next.focus();
    } else return;
    event.preventDefault();
  });
  return shape;
}

function drawLegend() {
  const entries = [['', `idle (of more than ${MOST_IDLE} those of what is selected)`], ['own1', 'ours, below 30 %'], ['own2', 'ours, below 80 %'], ['own3', 'ours, 80 % and more'],
    ['cross1', 'cross traffic, below 30 %'], ['cross2', 'cross traffic, below 80 %'], ['cross3', 'cross traffic, 80 % and more'],
    ['failed', 'failed'], ['withdrawn', 'drained'], ['route', 'route of the selected communicator']];
  byId('legend').replaceChildren(...entries.map(([of, text]) => element('li', {},
    drawing('svg', { viewBox: '0 0 32 10', 'aria-hidden': 'true' }, drawing('path', { class: `link ${of}`, d: 'M0 5H32' })), ` ${text}`)));
}

// What is selected

function choose(selected) {
  view.selected = selected;
  dirty.add('selected');
  schedule();
}

function selectedRoute() {
  const plan = view.selected?.plan && facts.plans.get(view.selected.plan), route = new Set();
  for (const edge of plan?.ring_edges ?? []) {
    route.add(edge.from);
    for (const path of edge.paths ?? []) hops(edge, path).forEach((link) => route.add(link));
  }
  return route;
}

function drawDetail() {
  const title = byId('detail-title'), body = byId('detail-body'), { selected } = view;
  const of = selected?.plan ? 'plan' : selected?.key?.split(' ')[0];
  if (!of) return;
  if (body.dataset.of !== of) {
    body.dataset.of = of;
    body.replaceChildren(...['p', 'div', 'div', 'div'].map((name) => element(name)));
  }
  const [text, life, first, second] = body.children;
  if (of === 'plan') {
    drawPlan(title, text, first, second);
    drawLife(life, facts.operations.get(selected.plan));
    return;
  }
  const { racks } = layout(), name = selected.key.slice(of.length + 1), planned = plannedLoads();
  const rack = racks.find((one) => of === 'rack' && one.name === name);
  const switches = of === 'switch' ? [name] : [...rack?.switches ?? []];
  setText(title, `${of === 'rack' ? 'Rack' : 'Switch'} ${name}`);
  setText(text, of === 'rack' ? `Switches: ${switches.join(', ') || 'none'}` : describe(facts.switches.get(name) ?? {}));
  const links = values('links').filter((link) => switches.includes(link.from) || switches.includes(link.to));
  links.sort((a, b) => (facts.hosts.has(a.from) || facts.hosts.has(a.to)) - (facts.hosts.has(b.from) || facts.hosts.has(b.to)));
  table(first, 'Links', [
    ['Link', (link) => `${link.from} → ${link.to}`],
    ['State', (link) => ({ text: link.state, tone: link.state === 'ok' ? '' : 'bad' })],
    ['Capacity', (link) => rate(link.capacity_bps), true],
    ['Cross traffic', (link) => rate(link.cross_traffic_bps), true],
    ['Planned', (link) => rate(planned.get(directed(link.from, link.to))), true],
    ['Connections', (link) => count(link.connections), true],
  ], links.map((link) => [directed(link.from, link.to), link]), 'No links.');
  second.hidden = of !== 'rack';
  if (of === 'rack') table(second, 'Hosts', [
    ['Host', (host) => host.name],
    ['Agent', (host) => host.connected ? 'connected' : { text: 'none', tone: 'bad' }],
    ['Drained', (host) => host.withdrawn ? 'yes' : 'no'],
    ['Communicators', (host) => count(host.communicators), true],
    ['Sends', (host) => rate(sum(host, 'egress_bps')), true],
    ['Receives', (host) => rate(sum(host, 'ingress_bps')), true],
  ], (rack?.hosts ?? []).map((host) => [host.name, host]), 'No hosts.');
}

const sum = (host, field) => (facts.measured.get(host.name) ?? []).reduce((all, link) => all + (link[field] ?? 0), 0);

function drawPlan(title, text, first, second) {
  const plan = facts.plans.get(view.selected.plan), edges = plan?.ring_edges ?? [];
  setText(title, plan ? `Communicator ${plan.tenant}/${plan.name ?? ''}` : 'Communicator that has ended');
  setText(text, plan ? [plan.reason, plan.codec_reason, plan.aggregation_reason, plan.algorithm_reason, plan.hints, plan.interleaving]
    .filter(Boolean).join(' · ') : '');
  second.hidden = false;
  const rows = edges.flatMap((edge) => (edge.paths ?? [{}]).map((path, index) => [`${edge.from} ${edge.to} ${index}`, { edge, path }]));
  table(first, 'Route', [
    ['From', ({ edge }) => edge.from], ['To', ({ edge }) => edge.to],
    ['Over', ({ path }) => path.switches?.join(' → ') ?? 'not known'],
    ['Port', ({ path }) => path.source_port ?? '-', true], ['Held to', ({ edge }) => rate(edge.rate_bps), true],
  ], rows, 'No links: all ranks are on one host.');
  table(second, 'Algorithms', [
    ['Collective', (one) => one.collective], ['From bytes', (one) => count(one.from_bytes), true], ['Algorithm', (one) => one.algorithm],
  ], (plan?.algorithms ?? []).map((one) => [`${one.collective} ${one.from_bytes ?? 0}`, one]), 'No algorithms yet.');
}

// One operation's life, a bar a rank: it waits until the last rank calls, data move, it is done.
function drawLife(parent, one) {
  const ranks = one?.ranks ?? [], row = 18, [left, right] = [140, 598];
  parent.hidden = !ranks.length;
  if (!ranks.length) return;
  if (!parent.firstElementChild) {
    parent.append(element('h3'), element('p'), drawing('svg', { role: 'img', class: 'life' }), element('p', { class: 'hint' },
      'Dashed: the rank waits until the last one calls. Filled: data move. Line: it has the result; a failed one has none.'), element('div'));
  }
  const [title, text, svg, , box] = parent.children;
  const called = (rank) => rank.called_ns ?? 0, time = (ns) => ns ? duration(ns) : '0 ns';
  const last = ranks.reduce((a, b) => called(b) > called(a) ? b : a), begin = called(last);
  const end = Math.max(begin, 1, ...ranks.map((rank) => rank.ended_ns ?? 0));
  const ready = (rank) => Math.min(begin, rank.ended_ns ?? begin), done = (rank) => rank.ended_ns ?? ready(rank);
  const failed = ranks.filter((rank) => rank.ended_ns === undefined).length;
  setText(title, `Operation ${count(one.number)}, ${scaled(one.bytes ?? 0, ['B', 'kB', 'MB', 'GB'], 1000)} a rank`);
  setText(text, [`Rank ${last.rank ?? 0} on ${last.host ?? 'no host'} called last, ${time(begin)} after the first.`,
    failed ? `Ranks that failed: ${count(failed)}.` : `The last result came after ${time(end)}.`,
    one.others ? `${count(one.others)} more ranks are not shown.` : ''].filter(Boolean).join(' '));
  const x = (ns) => left + (right - left) * ns / end;
  svg.setAttribute('viewBox', `0 0 600 ${ranks.length * row}`);
  svg.setAttribute('aria-label', text.textContent);
  svg.replaceChildren(...ranks.flatMap((rank, at) => {
    const bar = (of, from, to, height) => drawing('rect', { class: of, x: x(from), width: Math.max(0, x(to) - x(from)), y: at * row + (row - height) / 2, height });
    return [drawing('text', { x: 0, y: at * row + 13 }, `rank ${rank.rank ?? 0} ${short(rank.host ?? '', 14)}`),
      bar('waits', called(rank), ready(rank), 10), bar('moves', ready(rank), done(rank), 12), bar('done', done(rank), rank.ended_ns === undefined ? 0 : end, 2)];
  }));
  table(box, 'Operation by rank', [
    ['Rank', (rank) => count(rank.rank), true], ['Host', (rank) => rank.host ?? ''],
    ['Calls after', (rank) => time(called(rank)), true],
    ['Waits', (rank) => time(ready(rank) - called(rank)), true],
    ['Moves', (rank) => time(done(rank) - ready(rank)), true],
    ['Has the result after', (rank) => rank.ended_ns === undefined ? { text: 'failed', tone: 'bad' } : time(rank.ended_ns), true],
  ], ranks.map((rank) => [String(rank.rank ?? 0), rank]), '');
}

// Tables and the timeline

function drawCommunicators() {
  const wanted = view.filter.trim().toLowerCase();
  const rows = [...facts.communicators].map(([key, one]) => [key, { one, plan: facts.plans.get(key) ?? {} }]).filter(([key, { one, plan }]) =>
    !wanted || [key, one.tenant, one.name, one.phase, ...plan.order ?? []].some((text) => text?.toLowerCase().includes(wanted)));
  const parent = byId('communicators-table');
  if (!parent.firstElementChild) parent.append(element('div'), element('button', { type: 'button', class: 'more', onclick: () => {
    view.rows += PAGE_ROWS;
    dirty.add('communicators');
    schedule();
  } }));
  const [box, more] = parent.children;
  table(box, 'Communicators', [
    ['Communicator', ({ one }, key) => ({ text: `${one.tenant}/${one.name ?? ''}`, act: () => choose({ plan: key }) })],
    ['State', ({ one }) => one.phase ?? ''],
    ['Ranks', ({ one }) => count(one.ranks), true],
    ['Hosts', ({ plan }) => count(plan.order?.length), true],
    ['Epoch', ({ one }) => one.next_epoch ? `${one.epoch ?? 0} → ${one.next_epoch}` : count(one.epoch), true],
    ['Share', ({ plan }) => rate(plan.share_bps), true],
    ['Slowdown', ({ plan }) => plan.slowdown_ppm ? (plan.slowdown_ppm / 1e6).toFixed(2) : '-', true],
    ['Codec', ({ plan }) => plan.codec ?? ''],
    ['Operation', ({ one }) => duration(one.telemetry?.median_operation_ns), true],
    ['Agreement', ({ one }) => one.agreement ? one.agreement.broken ? { text: 'broken', tone: 'bad' } : 'upheld' : '-'],
  ], rows.slice(0, view.rows), wanted ? 'None fits the filter.' : 'No communicators.');
  more.hidden = rows.length <= view.rows;
  setText(more, `Show more: ${count(rows.length - view.rows)} besides`);
}

function drawTimeline() {
  const decisions = [...facts.decisions].sort(([, a], [, b]) => b.number - a.number);
  const list = byId('timeline');
  byId('changes-none').hidden = decisions.length > 0;
  keyed(list, decisions, () => element('li', {}, element('time'), element('strong'), element('p'), element('ul')), (row, one) => {
    const [time, cause, reason, changes] = row.children;
    setText(time, clock(one.at_ns));
    time.setAttribute('datetime', new Date(milliseconds(one.at_ns)).toISOString());
    setText(cause, ` ${one.cause}`);
    const [before, after] = [one.score_before_ppm, one.score_after_ppm].map((ppm) => ((ppm ?? 0) / 1e6).toFixed(2));
    setText(reason, `${one.reason ?? ''} (mean slowdown ${before} → ${after})`);
    keyed(changes, (one.changes ?? []).map((change) => [`${change.communicator} ${change.epoch}`, change]),
      () => element('li', {}, element('span'), element('span', { class: 'code' }), element('span')), (item, change) => {
        setText(item.children[0], `${change.tenant ? `${change.tenant}/${change.name ?? ''}` : change.communicator} epoch ${change.epoch}: `);
        setText(item.children[1], change.reason_code ?? '');
        const took = change.switched_ns ? `, ${duration(change.switched_ns - change.sent_ns)}` : '';
        setText(item.children[2], ` ${change.reason ?? ''} — ${change.outcome}${took}`);
      });
  });
}

function drawTenants() {
  table(byId('tenants-table'), 'Tenants', [
    ['Tenant', (one) => one.name], ['From', (one) => one.configured ? 'configuration' : `added ${clock(one.added_ns)}`],
    ['Communicators', (one) => count(one.communicators), true], ['Ranks', (one) => count(one.ranks), true],
    ['Agreements', (one) => count(one.agreements), true],
    ['Broken', (one) => ({ text: count(one.broken), tone: one.broken ? 'bad' : '' }), true],
    ['Errors', (one) => ({ text: count(one.errors), tone: one.errors ? 'bad' : '' }), true],
  ], inOrder('tenants').map((one) => [one.name, one]), 'No tenants.');
}

function drawAgreements() {
  const rows = [...facts.communicators].filter(([, one]) => one.agreement);
  table(byId('agreements-table'), 'Agreements', [
    ['Communicator', (one, key) => ({ text: `${one.tenant}/${one.name ?? ''}`, act: () => choose({ plan: key }) })],
    ['Promised', ({ agreement }) => describe(agreement.constraints ?? {}) || 'nothing now'],
    ['Since', ({ agreement }) => clock(agreement.since_ns)],
    ['State', ({ agreement }) => agreement.broken ? { text: `broken: ${agreement.broken.join(', ')}`, tone: 'bad' } : 'upheld'],
    ['Operations', ({ agreement }) => count(agreement.record?.operations), true],
    ['Missed', ({ agreement }) => count(agreement.record?.missed), true],
  ], rows, 'Nothing has been promised.');
}

function drawFindings() {
  const entry = (at, kind, text, bad) => ({ at: at ?? 0, kind, text, bad });
  const rows = [
    ...[...facts.withdrawals].map(([key, one]) => [`w ${key}`, entry(one.from_ns, one.kind, describe({ ...one, kind: undefined, place: undefined }), false)]),
    ...[...facts.ended].map(([key, one]) => [`e ${key}`, entry(one.at_ns, words(one.kind), `${one.tenant}/${one.name ?? ''}: ${one.detail ?? ''}`, true)]),
    ...[...facts.waiting].map(([key, one]) => [`j ${key}`, entry(one.since_ns, 'waits', `${one.tenant}/${one.name}: ${count(one.joined?.length)} of ${one.ranks} ranks have joined`, false)]),
    ...[...facts.stragglers].map(([key, one]) => [`s ${key}`, entry(one.since_ns, 'straggler', describe(one), true)]),
    ...[...facts.findings].map(([key, one]) => [`f ${key}`, entry(one.at_ns, one.kind, `${one.reported_by ?? 'control'}: ${describe(one[one.kind] ?? {})}`, false)]),
  ];
  rows.sort(([, a], [, b]) => b.at - a.at);
  table(byId('findings-table'), 'Findings, drains and errors', [
    ['When', (one) => clock(one.at)], ['What', (one) => ({ text: one.kind, tone: one.bad ? 'bad' : '' })], ['About', (one) => one.text],
  ], rows.slice(0, 200), 'Nothing of note.');
}

function drawSummary() {
  const hosts = values('hosts'), links = values('links'), control = facts.control.get('control') ?? {};
  const broken = values('communicators').filter((one) => one.agreement?.broken).length;
  const states = ['failed', 'congested', 'withdrawn'].map((state) => [links.filter((link) => link.state === state).length, state]);
  const entries = [
    ['hosts', `${count(hosts.filter((host) => host.connected).length)} of ${count(hosts.length)} hosts`],
    ['communicators', `${count(facts.communicators.size)} communicators`],
    ['plans', `${count(control.changes_completed)} plan changes`],
    ...states.filter(([number]) => number).map(([number, state]) => [state, `${count(number)} link directions ${state}`]),
    ...(broken ? [['broken', `${count(broken)} agreements broken`]] : []),
    ['build', `control ${control.build ?? ''}`],
  ];
  keyed(byId('summary'), entries, () => element('li'), (row, text) => setText(row, text));
}

const DRAWINGS = [
  [drawSummary, ['control', 'hosts', 'links', 'communicators']],
  [drawFabric, ['hosts', 'switches', 'links', 'plans', 'measured', 'selected']],
  [drawDetail, ['hosts', 'switches', 'links', 'plans', 'measured', 'operations', 'selected']],
  [drawCommunicators, ['communicators', 'plans']],
  [drawTimeline, ['decisions']],
  [drawTenants, ['tenants']],
  [drawAgreements, ['communicators']],
  [drawFindings, ['withdrawals', 'ended', 'waiting', 'stragglers', 'findings']],
];

let scheduled = false;

// Once a frame; where the browser draws no frames, as in the background, a little later.
function schedule() {
  if (scheduled) return;
  scheduled = true;
  const draw = () => {
    if (!scheduled) return;
    scheduled = false;
    const now = new Set(dirty);
    dirty.clear();
    for (const [drawOne, needs] of DRAWINGS) if (needs.some((name) => now.has(name))) drawOne();
    document.documentElement.dataset.number = view.number;
    if (!performance.getEntriesByName('drawn').length) performance.mark('drawn');
  };
  requestAnimationFrame(draw);
  setTimeout(draw, 200);
}

// The stream

function say(text, lost) {
  const status = byId('connection');
  setText(status, text);
  status.classList.toggle('lost', lost);
}

function take({ number, sections, gone }, all) {
  for (const name of SECTIONS) {
    if (all) { facts[name].clear(); dirty.add(name); }
    for (const [key, entry] of Object.entries(sections[name] ?? {})) { facts[name].set(key, entry); dirty.add(name); }
    for (const key of gone[name] ?? []) { facts[name].delete(key); dirty.add(name); }
  }
  view.number = number;
  say('live', false);
  schedule();
}

byId('filter').addEventListener('input', (event) => {
  view.filter = event.target.value;
  view.rows = PAGE_ROWS;
  dirty.add('communicators');
  schedule();
});
drawLegend();

const stream = new EventSource('events');
stream.addEventListener('all', (event) => take(JSON.parse(event.data), true));
stream.addEventListener('change', (event) => take(JSON.parse(event.data), false));
stream.addEventListener('problem', (event) => say(JSON.parse(event.data), true));
stream.addEventListener('error', () => say(stream.readyState === EventSource.CLOSED
  ? 'control lets nobody in, or is gone: load the page again' : 'the connection is lost; trying again', true));
