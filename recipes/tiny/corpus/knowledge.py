"""Short explanations and instructions that the assistant knows by heart. Data only."""

CONCEPTS = {
    "a loop": "A loop repeats a block of code until a condition is met. It saves you from writing "
    "the same lines again and again.",
    "a variable": "A variable is a name for a value. You can read it, change it and pass it on.",
    "a function": "A function is a named piece of code. It takes arguments, does one job and "
    "returns a result.",
    "recursion": "Recursion is when a function calls itself. It needs a base case so that it "
    "stops.",
    "a list": "A list is an ordered collection of values. In Python you write it with square "
    "brackets.",
    "a dictionary": "A dictionary maps keys to values. Looking up a key is fast, whatever the "
    "size.",
    "a class": "A class describes a kind of object. It says what data the object holds and what "
    "it can do.",
    "an exception": "An exception signals that something went wrong. You can catch it and decide "
    "what to do next.",
    "a compiler": "A compiler translates source code into machine code before the program runs.",
    "an interpreter": "An interpreter reads a program and runs it step by step.",
    "a database": "A database stores data so that it can be searched and changed safely.",
    "an API": "An API is a set of calls that one program offers to another. It hides how the work "
    "is done.",
    "a neural network": "A neural network is a function with many weights. Training adjusts the "
    "weights until the outputs fit the examples.",
    "a token": "A token is a small piece of text, such as a word or part of a word. Language "
    "models read and write tokens.",
    "speculative decoding": "Speculative decoding uses a small drafter to guess several tokens "
    "ahead. The target model checks them all at once and keeps the ones that are right.",
    "a cache": "A cache keeps results that were costly to compute. The next time they are needed "
    "they are simply read.",
    "gravity": "Gravity is the force that pulls objects toward each other. It keeps our feet on "
    "the ground and the planets in their orbits.",
    "photosynthesis": "Photosynthesis is how plants turn light, water and air into sugar. They "
    "release oxygen as they do it.",
    "an atom": "An atom is the smallest piece of an element. It has a nucleus with electrons "
    "around it.",
    "the water cycle": "Water rises from the sea as vapor, forms clouds and falls as rain. Rivers "
    "then carry it back to the sea.",
    "a rainbow": "A rainbow appears when sunlight passes through drops of rain. The drops split "
    "the light into its colors.",
    "an eclipse": "An eclipse happens when one body moves into the shadow of another. In a solar "
    "eclipse the moon hides the sun.",
    "a volcano": "A volcano is an opening in the ground where hot melted rock comes out. The rock "
    "is called lava.",
    "electricity": "Electricity is the flow of tiny charges through a wire. It carries energy to "
    "lamps and machines.",
    "a magnet": "A magnet pulls on iron and on other magnets. It has a north and a south pole.",
    "sound": "Sound is a vibration that travels through air. Our ears turn it into what we hear.",
    "a prime number": "A prime number can only be divided by one and by itself. The first primes "
    "are 2, 3, 5 and 7.",
    "a fraction": "A fraction is a part of a whole. The bottom number says how many parts there "
    "are, the top number how many we take.",
    "a triangle": "A triangle is a shape with three sides and three corners. Its angles add up to "
    "180 degrees.",
    "the moon": "The moon is a ball of rock that circles the Earth. One trip takes about a month.",
}

HOW_TO = {
    "make tea": (
        "Boil some water.",
        "Put a tea bag in a cup.",
        "Pour the water over it.",
        "Wait three minutes and take the bag out.",
    ),
    "boil an egg": (
        "Fill a pot with water and bring it to a boil.",
        "Lower the egg in with a spoon.",
        "Wait eight minutes.",
        "Cool the egg in cold water and peel it.",
    ),
    "plant a seed": (
        "Fill a small pot with soil.",
        "Make a hole with your finger.",
        "Drop the seed in and cover it.",
        "Water it and put it in the light.",
    ),
    "learn a language": (
        "Learn a few words every day.",
        "Listen to simple stories.",
        "Speak with a friend each week.",
        "Write down what you learn.",
    ),
    "clean a window": (
        "Dust the frame.",
        "Spray the glass with soapy water.",
        "Wipe it with a soft cloth.",
        "Dry the edges.",
    ),
    "write a letter": (
        "Start with a greeting.",
        "Say why you are writing.",
        "Tell your news in a few lines.",
        "Close with good wishes and your name.",
    ),
    "debug a program": (
        "Read the error message.",
        "Make a small example that fails.",
        "Check your assumptions one by one.",
        "Fix the cause and add a test.",
    ),
    "make pancakes": (
        "Mix flour, milk and two eggs.",
        "Heat a little butter in a pan.",
        "Pour in some batter and wait one minute.",
        "Turn the pancake over and bake the other side.",
    ),
    "sleep better": (
        "Go to bed at the same time every day.",
        "Keep the room dark and cool.",
        "Put the phone away an hour before.",
        "Read a few pages of a book.",
    ),
    "save money": (
        "Write down what you spend.",
        "Set a small goal for each month.",
        "Cook at home more often.",
        "Put the rest into savings.",
    ),
}

COMMANDS = {
    "list files": "ls -la",
    "show the current directory": "pwd",
    "make a directory": "mkdir -p new_folder",
    "count the lines of a file": "wc -l file.txt",
    "find all Python files": "find . -name '*.py'",
    "search for a word in files": "grep -rn 'word' .",
    "show the last lines of a file": "tail -n 20 file.txt",
    "copy a file": "cp source.txt target.txt",
    "rename a file": "mv old.txt new.txt",
    "delete a file": "rm file.txt",
    "see the disk usage": "du -sh .",
    "show running processes": "ps aux",
    "create a virtual environment": "python -m venv .venv",
    "run the tests": "python -m pytest -q",
    "see what changed in git": "git diff",
    "make a commit": "git commit -am 'Describe the change'",
}
