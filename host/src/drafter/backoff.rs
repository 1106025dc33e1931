//! How long a drafter whose drafts are hopeless is left alone: exponential backoff.

/// Time between two trials, in tokens or steps: doubled by each trial that changes nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first: u32,
    most: u32,
    length: u32,
}

impl Backoff {
    /// Begins at `first`, which is not more than `most`.
    pub(crate) const fn new(first: u32, most: u32) -> Self {
        Self { first, most, length: first }
    }

    /// The time to the next trial.
    pub(crate) const fn length(&self) -> u32 {
        self.length
    }

    /// After a trial that changed nothing.
    pub(crate) fn lengthen(&mut self) {
        self.length = (2 * self.length).min(self.most);
    }

    /// After one that did.
    pub(crate) fn reset(&mut self) {
        self.length = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::Backoff;

    #[test]
    fn it_doubles_up_to_the_most_and_begins_again() {
        let mut backoff = Backoff::new(8, 50);
        let lengths = [(); 5].map(|()| {
            let length = backoff.length();
            backoff.lengthen();
            length
        });
        assert_eq!(lengths, [8, 16, 32, 50, 50]);
        backoff.reset();
        assert_eq!(backoff.length(), 8);
    }
}
