/* The search of the site: a worker in place of Zensical's, with the same messages.

{type: 0, data: {items}} builds the index and is answered by {type: 1}; {type: 2, data: {input}} is a query, answered by
{type: 3, data: {items}}: the best sections, each with the places of the words in its title, path and text.

A section need not contain every word of a query: words in titles, rare words, words that follow one another and words
elsewhere on the same page count. Guides count more than references, further sections of one page less. */
(() => {
  const STOP = new Set(("a an and any are as at be between by can cannot could do does for from get has have how i if in into is it its " +
    "just like make me my no not of on only or our should so some than that the their there these this to use used using versus vs want " +
    "was we what when where which while why will with without works would you your").split(" "));
  const WEIGHTS = [
    [/^docs\/guides\//, 1.3], [/^docs\/(install|tutorial|migrate|custom-loss)/, 1.2],
    [/^docs\/reference\/(components|interfaces|api|python)/, 0.6], [/^docs\/reference\//, 0.85],
    [/^(README|index|AGENTS|plugins|recipes|examples)/, 0.7],
  ];
  const FIELDS = { title: 3, path: 1.2, text: 1 };
  const MOST = 30;  // hits
  const WORD = /[\p{L}\p{N}]+/gu;

  let items = [];     // sections: location, level, title, text (HTML), path (titles of the pages above)
  let pages = [];     // of each section
  let weights = [];   // of each section
  let names = [];     // the end of the line "Also called: …" in each section's text; 0 without one
  let places = {};    // word → [section, field, start, end, number of the word in the field]…

  function stem(word) {
    const short = word.replace(/(ies)$/, "y").replace(/(ing|ers?|ed|es|s)$/, "");
    return short.length > 3 ? short : word;
  }

  function* wordsOf(text) {  // not those inside of tags
    const bare = text.replace(/<[^>]*>|&[a-z#0-9]+;/g, tag => " ".repeat(tag.length)).toLowerCase();
    for (const found of bare.matchAll(WORD)) yield [found[0], found.index, found.index + found[0].length];
  }

  function build(data) {
    items = data.items;
    pages = items.map(item => item.location.replace(/#.*/, ""));
    weights = pages.map(page => (WEIGHTS.find(([pattern]) => pattern.test(page)) || [null, 1])[1]);
    names = items.map(({ text }) => (/^\s*<p>(<em>)?Also called/.test(text) ? text.indexOf("</p>") : 0));
    places = Object.create(null);
    items.forEach((item, section) => {
      for (const field of ["title", "path", "text"]) {
        let number = 0, before = 0;  // places in a path are counted over all of its titles
        for (const text of [].concat(item[field] || [])) {
          for (const [word, start, end] of wordsOf(text)) (places[word] ||= []).push([section, field, before + start, before + end, number++]);
          before += text.length;
        }
      }
    });
  }

  function matching(query) {  // words of the index: [word, how well it matches]
    const root = stem(query);
    const found = [];
    for (const word in places) {
      if (word === query) found.push([word, 1]);
      else if (stem(word) === root) found.push([word, 0.9]);
      else if (query.length > 2 && word.startsWith(query)) found.push([word, 0.6]);
      else if (root.length > 4 && word.startsWith(root)) found.push([word, 0.5]);
    }
    return found;
  }

  function search(input) {
    const all = [...wordsOf(input)].map(([word]) => word);
    const meant = all.filter(word => !STOP.has(word));
    const words = [...new Set(meant.length ? meant : all)];
    const sections = new Map();  // section → points, words of the query, marks by field, words by place, and points of a phrase
    const ofPage = new Map();    // page → Map of word to points
    words.forEach((query, which) => {
      const best = new Map();    // section → points of this word
      for (const [word, quality] of matching(query)) {
        for (const [section, field, start, end, number] of places[word]) {
          const item = items[section];
          const named = field === "text" && item.level === 1 && start < names[section];
          const points = quality * (named ? 2.2 : FIELDS[field] * (field === "title" && item.level === 1 ? 1.3 : 1));
          best.set(section, Math.max(best.get(section) || 0, points));
          const mine = sections.get(section) || { points: 0, words: new Set(), marks: {}, after: new Map(), phrase: 0 };
          sections.set(section, mine);
          mine.words.add(which);
          (mine.marks[field] ||= []).push([start, end, query.length]);
          if (mine.after.get(`${field} ${number - 1}`) === which - 1) mine.phrase = Math.max(mine.phrase, points);
          mine.after.set(`${field} ${number}`, which);
        }
      }
      const rare = Math.log(1 + items.length / (1 + best.size));
      for (const [section, points] of best) {
        sections.get(section).points += points * rare;
        const page = ofPage.get(pages[section]) || new Map();
        ofPage.set(pages[section], page);
        page.set(which, Math.max(page.get(which) || 0, points * rare));
      }
    });
    const scores = [...sections].map(([section, mine]) => {
      const page = ofPage.get(pages[section]);
      const around = [...page.values()].reduce((sum, points) => sum + points, 0);
      const covered = (mine.words.size + (page.size - mine.words.size) * 0.6) / words.length;
      return { section, score: (mine.points + around * 0.6 + mine.phrase * 3) * covered ** 2 * weights[section] };
    });
    const byScore = (a, b) => b.score - a.score || a.section - b.section;
    const seen = new Map();
    for (const one of scores.sort(byScore)) {
      const before = seen.get(pages[one.section]) || 0;
      seen.set(pages[one.section], before + 1);
      one.score *= 0.6 ** before;
    }
    return scores.sort(byScore).slice(0, MOST).map(({ section }) => hit(section, sections.get(section).marks));
  }

  function hit(section, marks) {
    const matches = Object.keys(FIELDS).map((field, place) => {
      const ranges = (marks[field] || []).sort((a, b) => a[0] - b[0]).map(([start, end, value]) => ({ start, end, value }));
      return { id: section * 4 + place, field, value: { highlight: { ranges } }, score: 0 };
    });
    return { id: section, matches: matches.filter(match => match.value.highlight.ranges.length) };
  }

  self.onmessage = ({ data: { type, data } }) => {
    if (type === 0) {
      build(data);
      self.postMessage({ type: 1 });
    } else if (type === 2) {
      const found = search(data.input || "");
      self.postMessage({ type: 3, data: { items: found, query: {}, pagination: { total: found.length } } });
    }
  };
})();
