//! Answers that several commands have.

use coracle_base::error::Error;
use coracle_control::Answer;
use coracle_images::View;
use smol::channel::Sender;

pub(super) fn failed(error: &Error) -> Answer {
    Answer::Failed { message: error.to_string() }
}

/// Queues an answer for the client; it is dropped if the client has disconnected.
pub(super) async fn queue(answers: &Sender<Answer>, answer: Answer) {
    let _ = answers.send(answer).await;
}

pub(super) fn image(view: View) -> Answer {
    let View { id, tags, digests, size_bytes, user, pinned } = view;
    Answer::Image { id: id.to_string(), tags, digests, size_bytes, pinned, user }
}
