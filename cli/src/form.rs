//! Answers of a given form: the form that every answer of a command has.

use model::{Checkpoint, Conversation, Form, Forms, Shape};

/// The form of a command's answers, compiled for its model.
pub struct Wanted(Form);

impl Wanted {
    /// Of a shape, if one is asked for.
    ///
    /// # Errors
    /// What of it cannot be followed.
    pub fn new(checkpoint: &Checkpoint, shape: Option<&Shape>) -> anyhow::Result<Option<Self>> {
        let compile = |shape| Ok(Self(Forms::new(checkpoint)?.compile(shape)?));
        shape.map(compile).transpose()
    }

    /// For the continuation of a text.
    pub fn at_once(&self) -> Form {
        self.0.clone()
    }

    /// For the answer to a conversation, of which the checkpoint's template has made `prompt`.
    ///
    /// # Errors
    /// A template that fails, or a model whose thoughts have no end that can be told.
    pub fn in_conversation(
        &self,
        checkpoint: &Checkpoint,
        conversation: Conversation<'_>,
        prompt: &str,
    ) -> Result<Form, model::Error> {
        behind_thought(&self.0, checkpoint.chat_template.as_ref(), conversation, prompt)
    }
}

/// The same form, behind the thought that an answer to `conversation` begins with, if it does.
pub fn behind_thought(
    form: &Form,
    template: Option<&model::ChatTemplate>,
    conversation: Conversation<'_>,
    prompt: &str,
) -> Result<Form, model::Error> {
    match template.map(|template| template.thought(conversation, prompt)).transpose()?.flatten() {
        None => Ok(form.clone()),
        Some(opened) => form.after_thought(opened),
    }
}
