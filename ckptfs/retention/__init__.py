"""What a run keeps, and how the rest is deleted: the policy is pure, the deletion carries it out.

policy      which committed saves stay, by the folded logs
deletion    the delete in every log, then the bytes, in the background
"""
