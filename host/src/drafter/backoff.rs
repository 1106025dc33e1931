//! Exponential backoff: how long a drafter rests when its drafts are hopeless.

/// The time between two trials, in tokens or steps. Each trial that changes nothing doubles it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first: u32,
    most: u32,
    length: u32,
}

impl Backoff {
    /// Begins at `first`, which must not exceed `most`.
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

    /// After a trial that changed something.
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
