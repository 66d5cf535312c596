//! Every page is in the book's table of contents, and the target of every link exists.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::{files, pages, read, root};

/// The lines of a page that are neither in a block of code nor in code within a line.
fn prose(markdown: &str) -> Vec<String> {
    let mut in_block = false;
    let mut lines = Vec::new();
    for line in markdown.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            lines.push(line.split('`').step_by(2).collect::<Vec<_>>().join("`"));
        }
    }
    lines
}

/// The targets of the links of a page.
fn links(markdown: &str) -> Vec<String> {
    let mut links = Vec::new();
    for line in prose(markdown) {
        let targets = line
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
            .map(|(target, _)| target.to_owned());
        links.extend(targets);
    }
    links
}

/// The anchors of a page's headings, as mdBook and GitHub generate them.
fn anchors(markdown: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut in_block = false;
    for line in markdown.lines() {
        in_block ^= line.trim_start().starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !in_block) else {
            continue;
        };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let chars = heading
            .chars()
            .filter(|char| char.is_alphanumeric() || "-_ ".contains(*char));
        let name: String = chars
            .map(|char| if char == ' ' { '-' } else { char })
            .collect();
        let numbered = (1..).map(|count| format!("{name}-{count}"));
        if let Some(name) = std::iter::once(name.clone())
            .chain(numbered)
            .find(|anchor| !anchors.contains(anchor))
        {
            anchors.insert(name);
        }
    }
    anchors
}

/// A path without `.` and `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if normalized.file_name().is_some() => drop(normalized.pop()),
            part => normalized.push(part),
        }
    }
    normalized
}

/// The prefix of links of the book to a file of the repository.
const FILE_IN_REPOSITORY: &str = "https://github.com/oncegate/oncegate/blob/main/";

/// The prefix of links of the book to a directory of the repository.
const DIRECTORY_IN_REPOSITORY: &str = "https://github.com/oncegate/oncegate/tree/main/";

/// The path and the anchor of a link.
fn split(link: &str) -> (&str, Option<&str>) {
    link.split_once('#')
        .map_or((link, None), |(path, anchor)| (path, Some(anchor)))
}

/// What is wrong with the anchor of a link: the target has no such heading.
fn missing_heading(target: &Path, anchor: Option<&str>) -> Option<String> {
    let anchor = anchor.filter(|_| {
        target
            .extension()
            .is_some_and(|extension| extension == "md")
    })?;
    (!anchors(&read(target)).contains(anchor)).then(|| "the page has no such heading".to_owned())
}

/// What is wrong with a link of this page; `None` if its target exists.
fn broken(page: &Path, link: &str) -> Option<String> {
    if let Some(link) = [FILE_IN_REPOSITORY, DIRECTORY_IN_REPOSITORY]
        .iter()
        .find_map(|prefix| link.strip_prefix(prefix))
    {
        let (path, anchor) = split(link);
        let target = root().join(path);
        if !target.exists() {
            return Some("the checkout has no such file".to_owned());
        }
        return missing_heading(&target, anchor);
    }
    if ["https://", "http://", "mailto:"]
        .iter()
        .any(|scheme| link.starts_with(scheme))
    {
        return None;
    }
    let (path, anchor) = split(link);
    let target = if path.is_empty() {
        page.to_owned()
    } else {
        normalized(&page.parent()?.join(path))
    };
    if !target.exists() {
        return Some("there is no such file".to_owned());
    }
    let book = normalized(&root()).join("docs/src");
    if page.starts_with(&book) && !target.starts_with(&book) {
        return Some("it leads out of the book: link to the repository instead".to_owned());
    }
    missing_heading(&target, anchor)
}

#[test]
fn the_summary_lists_every_page_once() {
    let book = root().join("docs/src");
    let summary = links(&read(&book.join("SUMMARY.md")));
    let listed: BTreeSet<PathBuf> = summary
        .iter()
        .map(|link| normalized(&book.join(link)))
        .collect();
    assert_eq!(
        listed.len(),
        summary.len(),
        "docs/src/SUMMARY.md lists a page twice"
    );
    let existing: BTreeSet<PathBuf> = pages()
        .iter()
        .map(|page| normalized(page))
        .filter(|page| !page.ends_with("SUMMARY.md"))
        .collect();
    assert_eq!(
        listed, existing,
        "pages in docs/src/SUMMARY.md on the left, existing pages on the right"
    );
}

/// What a user would read at most. A page that grows takes the words from another one.
const MAX_WORDS: usize = 30_000;

#[test]
fn the_book_has_at_most_30_000_words() {
    let words: usize = pages()
        .iter()
        .map(|page| read(page).split_whitespace().count())
        .sum();
    assert!(words > 10_000, "only {words}: a page was not found");
    assert!(words <= MAX_WORDS, "{words}");
}

#[test]
fn the_target_and_anchor_of_every_link_exist() {
    let top_level = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "crates/README.md",
    ]
    .map(|name| root().join(name));
    let not_in_book = ["docs/evidence", "docs/contributing"]
        .into_iter()
        .flat_map(|directory| files(directory, "md"));
    let mut checked = 0;
    for page in pages().into_iter().chain(top_level).chain(not_in_book) {
        let page = normalized(&page);
        for link in links(&read(&page)) {
            assert_eq!(broken(&page, &link), None, "{}: {link}", page.display());
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} links were found");
}

/// The first line with text that mdBook would take for an HTML tag, and not show.
fn line_with_html(markdown: &str) -> Option<String> {
    let begins_tag = |rest: &str| {
        rest.starts_with(|char: char| char.is_ascii_alphabetic()) && !rest.starts_with("http")
    };
    prose(markdown)
        .into_iter()
        .find(|line| line.split('<').skip(1).any(begins_tag))
}

#[test]
fn text_that_looks_like_html_is_in_code_spans() {
    for page in pages() {
        assert_eq!(
            line_with_html(&read(&page)),
            None,
            "{}: put it between backticks",
            page.display()
        );
    }
    assert_eq!(
        line_with_html("| a | <topic>.dead-letters |\n").as_deref(),
        Some("| a | <topic>.dead-letters |")
    );
    assert_eq!(
        line_with_html("`<topic>` and 1 < 2 and <https://example.org>\n"),
        None
    );
}

#[test]
fn a_broken_link_is_detected() {
    let page = normalized(&root().join("docs/src/promises.md"));
    for (link, is_valid) in [
        ("stores.md", true),
        ("stores.md#marker-format", true),
        ("#bare", true),
        ("https://example.org/anything", true),
        (
            "https://github.com/oncegate/oncegate/blob/main/CONTRIBUTING.md#commands",
            true,
        ),
        (
            "https://github.com/oncegate/oncegate/blob/main/CONTRIBUTING.md#no-such-heading",
            false,
        ),
        (
            "https://github.com/oncegate/oncegate/blob/main/none.md",
            false,
        ),
        (
            "https://github.com/oncegate/oncegate/tree/main/docs/src",
            true,
        ),
        ("store.md", false),
        ("stores.md#why-redlock", false),
        ("../../README.md", false),
    ] {
        assert_eq!(broken(&page, link).is_none(), is_valid, "{link}");
    }
    assert_eq!(
        links("[a](b.md) `[c](d.md)` [e](f.md#g)\n```text\n[h](i.md)\n```\n"),
        ["b.md", "f.md#g"]
    );
    let headings = anchors("# It's a `Gate`\n## One\n```text\n# none\n```\n## One\n");
    assert_eq!(
        headings.into_iter().collect::<Vec<_>>(),
        ["its-a-gate", "one", "one-1"]
    );
}
