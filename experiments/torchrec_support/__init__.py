"""Which of TorchRec's features keep their bits when the model is compiled?"""
