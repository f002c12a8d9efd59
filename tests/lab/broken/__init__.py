"""Each module is `core` with one fault, made by the smallest change that public names allow.

They are not examples to learn from: they show that the lab can fail, and which test finds which fault.
What a fault needs to remember is called `_fault_...`, lest it fall on the state of the class it is made from.
"""
