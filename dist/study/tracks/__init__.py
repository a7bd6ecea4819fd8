"""The exercises, in four tracks; each track goes from easy to hard."""

from dist.study.exercise import Exercise
from dist.study.tracks import attention, gradients, ranks, tokens

TRACKS: dict[str, tuple[Exercise, ...]] = {
    "gradients": gradients.EXERCISES,
    "attention": attention.EXERCISES,
    "optimizer and ranks": ranks.EXERCISES,
    "tokenizer": tokens.EXERCISES,
}
EXERCISES = {exercise.name: exercise for track in TRACKS.values() for exercise in track}
