"""The shapes of OpenAI's requests and responses, vLLM's extensions included; a room for each module that serves them.

Types are strict (1.5 is no seed, true is no number) and numbers finite; ranges are the engine's affair
(`core.SamplingParams`) and are not repeated here. A field that is null means the same as one that is absent. Unknown
fields are accepted and logged once, unless `--strict-fields` has them refused; fields that we know and do not honour
are always refused (`base.UNSUPPORTED`), because ignoring them would be a wrong answer that looks right. Answers are
`base.dumped`: a field that was not set is not there, a field set to None is null.
"""
