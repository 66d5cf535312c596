//! The tokens that identify claims.

/// Identifies one claim. Each claim gets a new token before its first operation is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u128);

impl Token {
    /// 128 random bits from the operating system.
    pub fn random() -> Self {
        Tokens::default().token()
    }
}

/// Generates random tokens. Gets the random bits of 64 tokens with one call to the operating
/// system.
#[derive(Default)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// A new, unique token.
    #[inline]
    pub fn token(&mut self) -> Token {
        match self.0.pop() {
            Some(token) => token,
            None => self.refill(),
        }
    }

    #[cold]
    fn refill(&mut self) -> Token {
        let mut bits = [0; 16 * 64];
        // Panics without random bits: without unique tokens, claims cannot be distinguished, and no
        // operation is safe.
        getrandom::fill(&mut bits).expect("the operating system provides random bytes");
        let (tokens, _) = bits.as_chunks::<16>();
        self.0
            .extend(tokens.iter().map(|bits| Token(u128::from_le_bytes(*bits))));
        self.0.swap_remove(0)
    }
}

impl std::fmt::Debug for Tokens {
    /// Hides the unused tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens")
    }
}
