"""Does the model of collectives on paper predict what gloo takes?"""
