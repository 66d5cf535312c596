//! `docs/upstream/README.md` names modules that describe their workarounds.

use super::{read, root};

/// What the description of a workaround has.
const PARTS: [&str; 4] = ["# Workaround", "*Symptom:*", "*Upstream:*", "*Test"];

/// The modules of a row, as paths below `base`, unless the row names another crate.
fn modules(row: &str, base: &str) -> Vec<String> {
    let cell = row.split(" | ").nth(1).unwrap_or_default();
    let mut names = cell.split('`').skip(1).step_by(2).peekable();
    let base = match names.next_if(|name| name.starts_with("oncegate-")) {
        Some(name) => format!("crates/{name}/src"),
        None => base.to_owned(),
    };
    let modules = names.filter(|name| name.contains('/') || !name.contains(char::is_uppercase));
    modules.map(|name| format!("{base}/{name}.rs")).collect()
}

#[test]
fn each_workaround_is_described_in_its_module() {
    let page = read(&root().join("docs/upstream/README.md"));
    let (mut base, mut checked) = (String::new(), 0);
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("Modules are those of `") {
            base = rest.split('`').next().unwrap_or_default().to_owned();
        }
        if !line.starts_with("| ") || line.starts_with("| ---") || line.starts_with("| workaround")
        {
            continue;
        }
        let modules = modules(line, &base);
        assert!(!modules.is_empty(), "no module in this row:\n{line}");
        for module in modules {
            let source = read(&root().join(&module));
            let lacks: Vec<&str> = PARTS
                .into_iter()
                .filter(|part| !source.contains(part))
                .collect();
            assert!(lacks.is_empty(), "{module} lacks {lacks:?}");
            checked += 1;
        }
    }
    assert!(checked > 25, "only {checked} modules were found");
}
