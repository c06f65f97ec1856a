//! The commands about how images come to the node and which of them it accepts: `image explain` and `image check --policy`.

use coracle_base::error::{Error, Kind};
use coracle_control::Answer;
use coracle_images::Images;
use coracle_job::{ExplainedEndpoint, Judged};
use smol::channel::Sender;

use super::answers::{failed, queue};

/// Judges all images of the store by the image policy.
pub(super) async fn judge(images: &Images, answers: &Sender<Answer>) {
    let all = match images.judged().await {
        Ok(Some(all)) => all,
        Ok(None) => {
            let text = "image.policy: there is no policy";
            return queue(answers, failed(&Error::new(Kind::FailedPrecondition, text))).await;
        }
        Err(error) => return queue(answers, failed(&error)).await,
    };
    for Judged { name, judgement, .. } in all {
        let answer = match judgement {
            Ok(signed) => Answer::Accepted { name, signed },
            Err(why) => Answer::Failed { message: format!("image {name}: would be refused: {why}") },
        };
        queue(answers, answer).await;
    }
}

/// Lists the endpoints and the rules of a reference.
pub(super) async fn explain(name: &str, images: &Images, answers: &Sender<Answer>) {
    match images.explain(name).await {
        Ok((name, endpoints, rules)) => {
            queue(answers, Answer::Explained { name }).await;
            for text in rules {
                queue(answers, Answer::Rule { text }).await;
            }
            for endpoint in endpoints {
                let ExplainedEndpoint { url, source, credentials, tls, proxy } = endpoint;
                queue(answers, Answer::Endpoint { url, source, credentials, tls, proxy }).await;
            }
        }
        Err(error) => queue(answers, failed(&error)).await,
    }
}
