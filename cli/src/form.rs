//! The form that every answer of a command has.

use model::{Checkpoint, Conversation, Form, Forms, Shape};

/// The form of a command's answers, compiled for its model.
pub struct Wanted(Form);

impl Wanted {
    /// Compiles a shape, if one is asked for.
    ///
    /// # Errors
    /// If the shape cannot be followed.
    pub fn new(checkpoint: &Checkpoint, shape: Option<&Shape>) -> anyhow::Result<Option<Self>> {
        let compile = |shape| Ok(Self(Forms::new(checkpoint)?.compile(shape)?));
        shape.map(compile).transpose()
    }

    /// The form of a text's continuation.
    pub fn at_once(&self) -> Form {
        self.0.clone()
    }

    /// The form of the answer to a conversation. `prompt` is what the checkpoint's template made of it.
    ///
    /// # Errors
    /// If the template fails, or the model's thoughts have no recognisable end.
    pub fn in_conversation(
        &self,
        checkpoint: &Checkpoint,
        conversation: Conversation<'_>,
        prompt: &str,
    ) -> Result<Form, model::Error> {
        behind_thought(&self.0, checkpoint.chat_template.as_ref(), conversation, prompt)
    }
}

/// The same form, after the thought that an answer to `conversation` begins with, if it begins with one.
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
