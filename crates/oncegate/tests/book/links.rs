//! Every page is in the book's table of contents, and every link leads somewhere.

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

/// What the links of a page point to.
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

/// The names by which a page's headings are linked to, as mdBook and GitHub make them.
fn anchors(markdown: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut in_block = false;
    for line in markdown.lines() {
        in_block ^= line.trim_start().starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !in_block) else {
            continue;
        };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let letters = heading
            .chars()
            .filter(|it| it.is_alphanumeric() || "-_ ".contains(*it));
        let name: String = letters.map(|it| if it == ' ' { '-' } else { it }).collect();
        let again = (1..).map(|count| format!("{name}-{count}"));
        if let Some(name) = std::iter::once(name.clone())
            .chain(again)
            .find(|it| !anchors.contains(it))
        {
            anchors.insert(name);
        }
    }
    anchors
}

/// A path without `.` and `..`.
fn tidy(path: &Path) -> PathBuf {
    let mut tidy = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if tidy.file_name().is_some() => drop(tidy.pop()),
            part => tidy.push(part),
        }
    }
    tidy
}

/// A file of the checkout, as the book links to it.
const REPOSITORY: &str = "https://github.com/oncegate/oncegate/blob/main/";

/// The same for a directory.
const DIRECTORY: &str = "https://github.com/oncegate/oncegate/tree/main/";

/// The path and the anchor of a link.
fn split(link: &str) -> (&str, Option<&str>) {
    link.split_once('#')
        .map_or((link, None), |(path, anchor)| (path, Some(anchor)))
}

/// Whether the target has this heading.
fn without_heading(target: &Path, anchor: Option<&str>) -> Option<String> {
    let anchor = anchor.filter(|_| target.extension().is_some_and(|it| it == "md"))?;
    (!anchors(&read(target)).contains(anchor)).then(|| "the page has no such heading".to_owned())
}

/// Why a link of this page leads nowhere, if it does.
fn broken(page: &Path, link: &str) -> Option<String> {
    if let Some(link) = [REPOSITORY, DIRECTORY]
        .iter()
        .find_map(|prefix| link.strip_prefix(prefix))
    {
        let (path, anchor) = split(link);
        let target = root().join(path);
        if !target.exists() {
            return Some("the checkout has no such file".to_owned());
        }
        return without_heading(&target, anchor);
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
        tidy(&page.parent()?.join(path))
    };
    if !target.exists() {
        return Some("there is no such file".to_owned());
    }
    let book = tidy(&root()).join("docs/src");
    if page.starts_with(&book) && !target.starts_with(&book) {
        return Some("it leads out of the book: link to the repository instead".to_owned());
    }
    without_heading(&target, anchor)
}

#[test]
fn every_page_is_in_the_summary_and_every_line_of_it_is_a_page() {
    let book = root().join("docs/src");
    let summary = links(&read(&book.join("SUMMARY.md")));
    let listed: BTreeSet<PathBuf> = summary.iter().map(|link| tidy(&book.join(link))).collect();
    assert_eq!(
        listed.len(),
        summary.len(),
        "a page stands twice in docs/src/SUMMARY.md"
    );
    let there: BTreeSet<PathBuf> = pages()
        .iter()
        .map(|page| tidy(page))
        .filter(|page| !page.ends_with("SUMMARY.md"))
        .collect();
    assert_eq!(
        listed, there,
        "docs/src/SUMMARY.md on the left, the pages that are there on the right"
    );
}

#[test]
fn every_link_and_anchor_leads_somewhere() {
    let around = [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "crates/README.md",
    ]
    .map(|name| root().join(name));
    let beside = ["docs/evidence", "docs/contributing"]
        .into_iter()
        .flat_map(|directory| files(directory, "md"));
    let mut checked = 0;
    for page in pages().into_iter().chain(around).chain(beside) {
        let page = tidy(&page);
        for link in links(&read(&page)) {
            assert_eq!(broken(&page, &link), None, "{}: {link}", page.display());
            checked += 1;
        }
    }
    assert!(checked > 100, "only {checked} links were found");
}

/// What mdBook takes for HTML that is not closed, and shows to nobody.
fn html(markdown: &str) -> Option<String> {
    let begins_a_tag = |rest: &str| {
        rest.starts_with(|it: char| it.is_ascii_alphabetic()) && !rest.starts_with("http")
    };
    prose(markdown)
        .into_iter()
        .find(|line| line.split('<').skip(1).any(begins_a_tag))
}

#[test]
fn what_looks_like_html_stands_in_code() {
    for page in pages() {
        assert_eq!(
            html(&read(&page)),
            None,
            "{}: put it between backticks",
            page.display()
        );
    }
    assert_eq!(
        html("| a | <topic>.dead-letters |\n").as_deref(),
        Some("| a | <topic>.dead-letters |")
    );
    assert_eq!(
        html("`<topic>` and 1 < 2 and <https://example.org>\n"),
        None
    );
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let page = tidy(&root().join("docs/src/promises.md"));
    for (link, good) in [
        ("stores.md", true),
        ("redis.md#marker-format", true),
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
        assert_eq!(broken(&page, link).is_none(), good, "{link}");
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
