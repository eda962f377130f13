def judge_mutant(seed): raise NotImplementedError
