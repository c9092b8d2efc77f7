"""What is looked at before, in and after a step, so that nothing goes wrong without a word. Read in this order:

given (is the batch right?), shortage (a device that has no memory left), agreement (what ranks tell each other of both), trained
(is the model still the one that was wrapped?), arguments (was it wrapped alike on all ranks?), stale (layers whose newest values
other ranks have), elementwise (does an optimizer work on parts of parameters?), handover (does one take the gradients?), finite
(where the first NaN arose).
"""
