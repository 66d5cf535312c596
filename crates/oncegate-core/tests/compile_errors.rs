//! What the compiler says about code that must not compile. The files `*.stderr` contain its whole
//! text; `TRYBUILD=overwrite cargo test -p oncegate-core --test compile_errors` writes them again,
//! for example for another version of the compiler.

#[test]
fn each_error_names_its_remedy() {
    let cases = trybuild::TestCases::new();
    // The settlement of a delivery consumes it.
    cases.compile_fail("tests/compile_errors/settle_once/*.rs");
    // What users write by mistake.
    cases.compile_fail("tests/compile_errors/mistakes/*.rs");
    // Correct code that resembles the mistakes.
    cases.pass("tests/compile_errors/compiles.rs");
}
