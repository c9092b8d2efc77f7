"""What does one CUDA card do, and how near is it to what is predicted?"""
