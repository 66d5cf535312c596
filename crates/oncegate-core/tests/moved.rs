//! What must happen once is moved: doing it twice does not compile.

#[test]
fn what_must_happen_once_does_not_compile_twice() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/moved/*.rs");
}
