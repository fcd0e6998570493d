"""One step as a pure function: prefill, decode, staged steps, and the step of the engine.

    prefill, decode    for a loop of one's own
    step               what these have in common; staged steps, which may be taken back
    serve_values       what the step of the engine is given and gives back
    call_cost          how long a call takes, by arithmetic
    draft_worth        how likely a draft has to be kept to be worth its row
    check_drafts       which drafts are checked, and how many are what is drawn
    plain_step         a decode step of the engine in two parts: the trunk, and the draws
    serve_step         the engine's: any mix of prompts, tokens and drafts, with their draws
    decode_steps       several decode steps of the engine in one call
    propose            what a draft keeps of the step's tokens, and its guesses
    draws              logits to tokens

`sampling` has the settings of a request, and those of a call's rows as arrays; `grammar` is what an
answer has to be.
"""
