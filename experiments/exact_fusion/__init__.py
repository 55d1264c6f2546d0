"""How much faster is a captured step whose exact operators are fused, and are its bits the same?"""
