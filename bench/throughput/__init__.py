"""How much faster is the plan than what people use today, measured?"""
