//! The settlement of a delivery consumes it: code that settles it twice does not compile.

#[test]
fn settling_a_delivery_twice_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/settle_once/*.rs");
}
